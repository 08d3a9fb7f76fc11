"""Rules of the stories: what is named in the beginning comes back at the end."""

from embedded_model.grammar import Alternative

STORIES: dict[str, tuple[Alternative, ...]] = {
    # Beginnings. The season turns the town, the town turns the person.
    "lost": (
        "Once upon a time there lived in {town=town@1} a {hero:person@town}{hero.trade} called "
        "{hero}. {habit@town}\n\n{loss}\n\n{searches}\n\n{found}\n\n{evening@hero}",
        "It was {season=season@1} in {town=town@season}, a town {town.where}, and "
        "{weather@season}. "
        "{hero=person@town} the {hero.trade} got up early. {habit@town}\n\n{loss}\n\n{searches}"
        "\n\n{found}\n\n{evening@hero}",
        "There was a {hero:person@5}{hero.trade} called {hero}, and {hero.he} had a "
        "{hero.animal} called {hero.pet}. They lived in {hero.town}. {habit@hero}\n\n{loss}\n\n"
        "{searches}\n\n{found}\n\n{evening@hero}",
    ),
    "habit": (
        "Every morning {hero.he} opened the window, looked at the sky and fed {hero.his} "
        "{hero.animal}, whose name was {hero.pet}.",
        "{hero.He} worked from dawn until dusk, and {hero.pet} the {hero.animal} was always with "
        "{hero.him}.",
        "Everybody knew {hero.him}, because no other {hero.trade} made such good {hero.dish}.",
        "{hero.He} did not have much, but {hero.he} had a warm house and {hero.pet} the "
        "{hero.animal}.",
    ),
    "loss": (
        "One day {hero.he} could not find {hero.his} {lost=treasure@hero}. {lost_worry}",
        "On {day@hero} something was wrong: the {lost=treasure@hero} was gone. {lost_worry}",
        "But when {hero.he} came home in the evening, {hero.his} {lost=treasure@hero} was not in "
        "its place. {lost_worry}",
    ),
    "lost_worry": (
        "{hero.He} looked under the bed and behind the door, but it was not there.",
        '"My {lost}!" cried {hero}. "It was a present from my grandmother."',
        "{hero.He} sat down on the floor and thought for a long time.",
    ),
    "searches": (
        "{search_one} {nothing} {search_two} {nothing} {search_three}",
        "{search_one} {nothing} {search_three}",
        "{search_one} {search_two} {nothing}\n\n{search_four} {nothing} {search_three}",
    ),
    "search_one": (
        "First {hero.he} went to {friend=person@lost} the {friend.trade}. "
        '"Have you seen my {lost}?" asked {hero}. {answer@friend}',
        "{hero} ran to the house of {friend=person@lost}, who was a {friend.trade}. "
        '"I have lost my {lost}," said {hero}. {answer@friend}',
        "So {hero} asked {friend=person@lost} the {friend.trade} for help. {answer@friend}",
    ),
    "answer": (
        '"No," said {friend}, "but I will help you look for it."',
        '"I have not seen it," said {friend}, "but ask your {hero.animal}. Animals see more than '
        'we do."',
        '{friend} shook {friend.his} head. "Yesterday it was still there," {friend.he} said.',
    ),
    "search_two": (
        "Then they looked by the {place=corner@lost}, and in every corner of the market.",
        "Together they walked to the {place=corner@lost} and asked everyone they met.",
        "After that they went down to the {place=corner@lost}, where the children play.",
    ),
    "corner": ("well", "old mill", "harbour", "garden wall", "bridge", "church"),
    "nothing": (
        "But the {lost} was not there.",
        "They found nothing.",
        "Nobody had seen the {lost}.",
    ),
    "search_three": (
        "At last {hero.pet} the {hero.animal} began to make a great noise.",
        "In the end it was {hero.pet} the {hero.animal} who knew the way.",
        "Then {hero} saw that {hero.pet} the {hero.animal} was looking at something.",
    ),
    "search_four": (
        "They asked the {helper=helper@hero}, who had been awake all night.",
        "They wrote a note and hung it on the door of the {helper=helper@hero}.",
    ),
    "helper": ("postman", "night watchman", "innkeeper", "schoolmaster"),
    "found": (
        "And there, {hiding@lost}, lay the {lost}. {thanks}",
        "{hero} followed {hero.pet}, and {hiding@lost} something was shining. It was the {lost}! "
        "{thanks}",
        'There it was, {hiding@lost}. "So it was you who took my {lost}," said {hero} to '
        "{hero.pet}, and laughed. {thanks}",
    ),
    "hiding": (
        "under the straw",
        "between the roots of a tree",
        "in an old boot",
        "behind the oven",
        "on the roof of the barn",
    ),
    "thanks": (
        "{hero} was so happy that {hero.he} invited {friend} to eat {hero.dish}.",
        '"Thank you, {friend}," said {hero}. "Come and eat {hero.dish} with us."',
        "{friend} was glad too, and they walked home together.",
    ),
    "evening": (
        "That evening {hero} the {hero.trade} and {hero.pet} sat by the fire. Outside it was "
        "dark, but in the little house it was warm. The {lost} never got lost again.",
        "From that day on {hero} kept the {lost} on a string around {hero.his} neck, and "
        "{hero.pet} the {hero.animal} got an extra piece of bread every evening.",
        "And if you go to {hero.town} today, you can still see the {lost} of {hero} the "
        "{hero.trade} in the window.",
    ),
    # A storm, and somebody who has to be brought home.
    "storm": (
        "The storm came in {season=season@2}. In {town=town@season} the wind tore at the roofs, "
        "and "
        "{hero=person@town} the {hero.trade} closed all the windows.\n\n{call}\n\n{way}\n\n"
        "{rescue}\n\n{calm@hero}",
        "In {season=season@3} a great storm came to {town=town@season}. It was night, and "
        "{hero=person@town} the {hero.trade} could not sleep.\n\n{call}\n\n{way}\n\n{rescue}\n\n"
        "{calm@hero}",
    ),
    "call": (
        "Suddenly there was a knock at the door. {caller=person@hero} the {caller.trade} stood "
        'outside, wet from head to foot. "{caller_words}" said {caller}.',
        "Then {hero.he} heard a voice in the dark. It was {caller=person@hero} the "
        '{caller.trade}. "{caller_words}" called {caller}.',
    ),
    "caller_words": (
        "My {caller.animal} {caller.pet} is still out there, near {town.landmark}!",
        "Please help me! {caller.pet}, my {caller.animal}, has not come home!",
    ),
    "way": (
        "{hero} took {first=tool@town} and {second=tool@first}, and they went out. {way_middle}",
        '"Then we will go and look," said {hero}. {hero.He} took {first=tool@town} from the wall '
        "and {second=tool@first} from the shelf. {way_middle}",
    ),
    "way_middle": (
        "The rain was so thick that they could hardly see {town.landmark}. They walked slowly, "
        "one step after another. {way_end}",
        "A tree had fallen across the road, and they had to climb over it. {way_end}",
        "The water in the streets came up to their knees. {way_end}",
    ),
    "way_end": (
        'After a while {caller} stopped. "Listen," said {caller}.',
        "Nobody spoke. Then {hero} lifted {hero.his} hand.",
    ),
    "rescue": (
        "There was {caller.pet} the {caller.animal}, sitting {refuge@caller}. {use_tool}",
        "They heard it again: it was {caller.pet}! The {caller.animal} sat {refuge@caller} and "
        "could not come down. {use_tool}",
    ),
    "refuge": (
        "in an apple tree",
        "on a broken wall",
        "under an empty boat",
        "on top of a cart",
    ),
    "use_tool": (
        "Because {hero} had brought {first}, it was quickly done, and soon {caller} held "
        "{caller.pet} in {caller.his} arms.",
        '"Good that we have {second}," said {hero}. A minute later {caller.pet} was safe.',
    ),
    "calm": (
        "In the morning the storm was over, and the sun rose over {town}. {caller} came to the "
        "house of {hero} with a bowl of {caller.dish}. They ate together, and {caller.pet} slept "
        "under the table.",
        "When they came back to {town}, {hero} made a fire and cooked {hero.dish}. {caller} the "
        '{caller.trade} said: "I will never forget this night." And {caller.he} never did.',
        "The next day all of {town} talked about {hero} the {hero.trade}, who had gone out into "
        "the storm for a {caller.animal} called {caller.pet}.",
    ),
    # Several adventures of the same person, for documents of several hundred tokens.
    "saga": (
        "{saga_begin}\n\n{saga_storm}\n\n{calm@hero}\n\n{evening@hero}",
        "{saga_begin}\n\n{saga_storm}\n\n{calm@hero}\n\n{saga_road}\n\n{evening@hero}",
        "{saga_begin}\n\n{saga_road}\n\n{saga_storm}\n\n{calm@hero}\n\n{evening@hero}",
    ),
    "saga_begin": (
        "This is the long story of {hero=person@10} the {hero.trade}, who lived in {hero.town} "
        "with "
        "{hero.pet} the {hero.animal}. {habit@hero}\n\n{loss}\n\n{searches}\n\n{found}",
        "The people of {home=town@4} tell many stories about {hero=person@home} the {hero.trade}, "
        "and this is the longest. {habit@home}\n\n{loss}\n\n{searches}\n\n{found}",
    ),
    "saga_storm": (
        "But that was not the end of it. In {season@hero} {hero} went to {town=town@hero} to sell "
        "{food@hero}, and in the night a storm broke loose. {call}\n\n{way}\n\n{rescue}",
        "A year later {hero} was in {town=town@hero}, and a great storm came over the town. "
        "{call}\n\n{way}\n\n{rescue}",
    ),
    "saga_road": (
        "In the next year {hero} had to bring a {parcel=parcel@hero} to {goal=town@lost}. "
        "{why_journey}\n\n{stages}\n\n{arrival}\n\n{journey_end@hero}",
        "Soon after that {hero} took a {parcel=parcel@hero} and set out for {goal=town@lost}. "
        "{why_journey}\n\n{stages}\n\n{arrival}\n\n{journey_end@hero}",
    ),
    # A journey from one town to another with something to deliver.
    "journey": (
        "This is how {hero=person@2} the {hero.trade} brought a {parcel=parcel@hero} from "
        "{hero.town} "
        "to {goal=town@hero}. {why_journey}\n\n{stages}\n\n{arrival}\n\n{journey_end@hero}",
        "Long ago {hero=person@9} the {hero.trade} went on a journey. {hero.He} carried a "
        "{parcel=parcel@hero}, and {hero.he} wanted to reach {goal=town@hero}. {why_journey}\n\n"
        "{stages}\n\n{arrival}\n\n{journey_end@hero}",
    ),
    "why_journey": (
        "It was meant for {friend=person@goal} the {friend.trade}, who had waited for it since "
        "{season@goal}.",
        "{friend=person@goal} the {friend.trade} had asked for it in a letter.",
    ),
    "stages": (
        "{stage_one} {stage_talk}\n\n{stage_two}",
        "{stage_one}\n\n{stage_two} {stage_talk}\n\n{stage_three}",
        "{stage_one} {stage_two}",
    ),
    "stage_one": (
        "On the first day {hero.he} came to a river. There was no bridge, but an old man with a "
        'boat sat on the bank. "{ferry_price}" said the old man.',
        "On the first day the road went through a dark forest, and {hero} sang so that {hero.he} "
        "would not be afraid.",
        "The first day was easy. {hero} walked through green fields, and {hero.pet} the "
        "{hero.animal} walked beside {hero.him}.",
    ),
    "ferry_price": (
        "Tell me a story, and I will take you across.",
        "Give me a little of your food, and I will row.",
        "What do you carry in your bag?",
    ),
    "stage_talk": (
        '"Where are you going?" asked a child on the road. "To {goal}," said {hero}, "with a '
        '{parcel} for {friend}."',
        'A woman with a cart stopped. "Is that a {parcel}?" she asked. "Yes," said {hero}, "and '
        'it is for {friend} in {goal}."',
    ),
    "stage_two": (
        "On the second day it rained. {hero} put the {parcel} under {hero.his} coat, and stayed "
        "dry in a barn until the evening.",
        "On the second day {hero} met a fox. The fox looked at the {parcel}, and {hero} looked at "
        "the fox, and then each went its own way.",
        "On the second night {hero} slept under the stars and dreamed of {hero.dish}.",
    ),
    "stage_three": (
        "On the third day {hero} could see {goal.landmark} from far away, and {hero.he} walked "
        "faster.",
        "On the third day {hero.his} feet hurt, but {hero.he} thought of {friend} and went on.",
    ),
    "arrival": (
        "At last {hero} stood before {goal.landmark} of {goal}. {friend} the {friend.trade} came "
        'out of the house and laughed. "My {parcel}!" said {friend}. "{friend_words@friend}"',
        "When {hero} came to {goal}, a town {goal.where}, it was market day. {friend} stood "
        'there selling {goal.goods}. "Here is your {parcel}," said {hero}. '
        '"{friend_words@friend}" answered {friend}.',
    ),
    "friend_words": (
        "Come in, you must be hungry.",
        "Sit down and tell me everything.",
        "I knew that you would come.",
    ),
    "journey_end": (
        "They ate {friend.dish}, and {hero} told of the road. Then {hero} went back to "
        "{hero.town}, and this time the way seemed short.",
        "{hero} stayed for {number_word@hero} days. When {hero.he} left, {friend} gave {hero.him} "
        "{gift@hero} to take home to {hero.town}.",
    ),
    "gift": ("a pot of {friend.dish}", "a pair of new shoes", "a book", "a bag of seeds"),
    # A contest at the fair.
    "contest": (
        "Every year there is a fair in {town=town@3}, and every year the people ask who is the "
        "best "
        "cook. {rivals}\n\n{cooking}\n\n{verdict@winner}\n\n{contest_end@winner}",
        "The fair of {town=town@5} is held in {season=season@town}, on a {town.day}. {rivals}\n\n"
        "{cooking}\n\n{verdict@winner}\n\n{contest_end@winner}",
    ),
    "rivals": (
        "This time {winner=person@town} the {winner.trade} made {winner.dish}, and "
        "{rival=person@winner} the {rival.trade} made {rival.dish}.",
        "{winner=person@town} came with {winner.dish}, and {rival=person@winner} the "
        "{rival.trade} came with {rival.dish}. {winner} was a {winner.trade}.",
    ),
    "cooking": (
        "{winner} cooked slowly and sang. {rival} cooked fast and did not look up. {mishap}",
        'All morning there was smoke over {town}. "It smells good," said the children. {mishap}',
    ),
    "mishap": (
        "Then {winner.pet} the {winner.animal} jumped on the table and upset the salt. "
        '"Oh no," said {winner}, "now there is too much salt in it!" But {winner.he} '
        "added {saving@winner} and stirred again.",
        "Then the fire went out. {rival} had no dry wood left, and {winner} gave {rival.him} half "
        "of {winner.his} own.",
    ),
    "saving": ("a little honey", "two apples", "some cream", "a cup of milk"),
    "verdict": (
        "The mayor tasted the {rival.dish} and nodded. Then the mayor tasted the {winner.dish}, "
        'and closed both eyes. "The prize goes to {winner}," said the mayor.',
        "The mayor took a spoon of {winner.dish}, and then another one, and then a third one. "
        "So everybody knew who had won.",
    ),
    "contest_end": (
        "The prize was a {prize=treasure@winner}. {winner} gave it to {rival}, who had none, and "
        "they have been friends ever since.",
        "{winner} got a {prize=treasure@winner}. It hangs in {winner.his} house in {winner.town}, "
        "and {winner.pet} the {winner.animal} likes to look at it.",
    ),
}
