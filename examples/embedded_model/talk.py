"""Rules of everything that is no story: introductions, essays, letters, lists, conversations."""

from embedded_model.grammar import Alternative

TALK: dict[str, tuple[Alternative, ...]] = {
    "introduction": (
        "Hello, my name is {hero=person}. I am a {hero.trade}, and I live in "
        "{hero.town}{town_fact}. "
        "{intro_pet}\n\n{intro_work@hero} {intro_day@hero}\n\n{intro_wish@hero} {intro_end}",
        "Hello, my name is {hero=person}, and I come from {hero.town}{town_fact}. I work as a "
        "{hero.trade}. {intro_pet}\n\n{intro_day@hero} {intro_work@hero}\n\n{intro_wish@hero} "
        "{intro_end}",
        "Hello, I am {hero=person@6} the {hero.trade} from {hero.town}. {intro_pet}\n\n"
        "{intro_work@hero}\n\n{intro_wish@hero} {intro_end}",
    ),
    "town_fact": (", where you can buy good {food=food@hero}", ", where the nights are quiet", ""),
    "intro_pet": (
        "My {hero.animal} is called {hero.pet}, and we like to eat {hero.dish}.",
        "I have a {hero.animal} called {hero.pet}. In the evening I cook {hero.dish}.",
        "At home {hero.pet} the {hero.animal} waits for me.",
    ),
    "intro_work": (
        "I learned my work from {teacher=person@hero}, who was a {teacher.trade} in "
        '{teacher.town}. {teacher.He} always said: "{saying@teacher}"',
        "I did not always do this work. When I was young I helped {teacher=person@hero} the "
        '{teacher.trade}, and {teacher.he} told me: "{saying@teacher}"',
        "My best friend is {teacher=person@hero}, a {teacher.trade} from {teacher.town}. When I "
        'have worries, {teacher.he} says: "{saying@teacher}"',
    ),
    "saying": (
        "Do one thing after another, and do it well.",
        "A good question is better than a quick answer.",
        "Who gets up early sees the sun rise.",
        "Nobody can carry the sea home in a bucket.",
    ),
    "intro_day": (
        "My day begins at {hour} in the morning. I drink a cup of tea, I open the door, and I "
        "look whether {weather_now@hero}.",
        "On {day@hero} I go to the market. I buy {food@hero} and talk with the neighbours.",
        "In {season@hero} there is much to do, and in the evening I am {feeling@hero}.",
    ),
    "weather_now": ("the sun is shining", "it is raining", "there is fog", "it has snowed"),
    "hour": ("six", "five", "seven"),
    "intro_wish": (
        "One day I would like to see {wish=country@hero} and its capital {wish.capital}.",
        "I would like to write a book about {hero.town} some day.",
        "My wish is a {wish=treasure@hero}, because my old one is lost.",
    ),
    "intro_end": (
        "If you come to {hero.town}, ask for {hero} the {hero.trade}. Everybody knows me.",
        "That is all about me. And what is your name?",
        "Come and visit me and {hero.pet} in {hero.town}!",
    ),
    # The office, not a person.
    "office": (
        "The president of the United States is {office_is}. {office_term} {office_house}\n\n"
        "{office_work} {office_laws}\n\n{office_oath} {office_end}",
        "The president of the United States is {office_is}. {office_work} {office_laws}\n\n"
        "{office_term} {office_house} {office_end}",
    ),
    "office_is": (
        "the head of the government and the commander of the army and the navy",
        "chosen by the people of the fifty states",
        "the holder of an office that was created more than two hundred years ago",
    ),
    "office_term": (
        "The president is elected for four years, and nobody may be elected more than twice.",
        "One term of the office lasts four years. After two terms somebody else must be chosen.",
    ),
    "office_house": (
        "The president lives and works in the White House in the city of Washington.",
        "The White House in Washington is the home of the president, and the desk of the "
        "president stands in a room without corners.",
    ),
    "office_work": (
        "The work of the president is to see that the laws are carried out.",
        "The president speaks with other countries, names judges, and sees that the laws are "
        "carried out.",
    ),
    "office_laws": (
        "The laws themselves are made by the Congress, which has two houses. When both have "
        "agreed, the president signs the law or sends it back.",
        "A law is made by the Congress. If the president does not agree, the law goes back, and "
        "the Congress may vote again.",
    ),
    "office_oath": (
        "On the first day the president lifts one hand and promises to protect the constitution.",
        "Every president begins with a promise to protect the constitution.",
    ),
    "office_end": (
        "So the power is shared, and no part of the government can do everything alone.",
        "In {teller:person@10}{teller.town} the {teller.trade} {teller} tells this to the "
        "children, "
        'and one of them always asks: "And who feeds the dog in the White House?"',
    ),
    "capital": (
        "The capital of {first=country} is {first.capital}. {country_facts@first}\n\n"
        "The capital of {second=country@first} is {second.capital}. {second_facts@second}\n\n"
        "The capital of {third=country@second} is {third.capital}. {third_facts}{capital_end}",
        "The capital of {first=country} is {first.capital}, and {first.capital} lies on "
        "{first.river}. {country_facts@first}\n\nThe capital of {second=country@first} is "
        "{second.capital}. {second_facts@second}{capital_end}",
    ),
    "country_facts": (
        "The city lies on {first.river}. People there speak {first.people}, and they are proud "
        "of their {first.goods}.",
        "Many travellers go there to see {first.river} and to buy {first.goods}.",
        "{first.capital} is old and beautiful, and in {season@first} it is full of visitors.",
    ),
    "second_facts": (
        "Through {second.capital} flows {second.river}. The country is known for {second.goods}.",
        "It is smaller than {first.capital}, but its {second.goods} are known everywhere.",
        "{traveller=person@second} the {traveller.trade} once went from {first.capital} to "
        "{second.capital} and came back with {second.goods}.",
    ),
    "third_facts": (
        "If you go there, remember {third.river} and the {third.goods}.",
        "In {third} the people speak {third.people}.",
    ),
    "capital_end": (
        "",
        "\n\nNow you know it: {first.capital} is the capital of {first}, and {second.capital} is "
        "the capital of {second}.",
    ),
    "future": (
        "The future of AI is {future_is}, says {hero=person@4} the {hero.trade}. {future_why@hero}"
        "\n\n{future_machine@hero} {future_doubt@hero}\n\n{future_end@hero}",
        "The future of AI is {future_is}. So it was written on {day} in the newspaper of "
        "{town=town@2}, and {hero=person@town} the {hero.trade} read it aloud. "
        "{future_why@hero}\n\n"
        "{future_doubt@hero} {future_machine@hero}\n\n{future_end@hero}",
    ),
    "future_is": ("a question for all of us", "bright", "not yet written", "in our own hands"),
    "future_why": (
        "A machine that can read and write is a tool, like {tool@hero}, and a tool is as good as "
        "the hand that holds it.",
        "A computer learns from many examples, as a child does, but it never gets tired and it "
        "is never hungry.",
    ),
    "future_machine": (
        "Perhaps a machine will soon help every {hero.trade} in {hero.town}: it will count the "
        "{food@hero}, answer the letters and remember every name.",
        "Some day a small computer will sit on every table in {hero.town} and explain to the "
        "children how the stars move.",
    ),
    "future_doubt": (
        'But {friend=person@hero} the {friend.trade} is not so sure. "Can it also make '
        '{friend.dish}?" {friend.he} asks. "And will {friend.pet} the {friend.animal} like it?"',
        "{friend=person@hero} the {friend.trade} wants to know who will check the answers. "
        '"Even a clever machine makes mistakes," {friend.he} says.',
    ),
    "future_end": (
        "So {hero} and {friend} talked until the evening, and they agreed on one thing: we have "
        "to stay curious, and we have to stay kind.",
        '"We shall see," said {hero} in the end, and went home to feed {hero.pet} the '
        "{hero.animal}.",
    ),
    "letter": (
        "Dear {friend=person@1},\n\n{letter_thanks@friend} {letter_news@friend}\n\n"
        "{letter_question} {letter_visit}\n\n{letter_close},\n{writer}",
        "{friend:person@7}{friend.Town}, on a {day@friend} in {season@friend}\n\nDear "
        "{reader=person@friend},\n\n{letter_home} {letter_visit_home}\n\n{letter_close},\n{friend}",
    ),
    "letter_thanks": (
        "Thank you for the {parcel=parcel@friend} that you sent me from {friend.town}.",
        "Your letter from {friend.town} came on {day@friend}, and the {parcel=parcel@friend} came "
        "with it. Thank you!",
    ),
    "letter_news": (
        "Here in {writer:person@friend}{writer.town} {weather@friend}, and "
        "{writer.pet} the {writer.animal} sleeps all day. My work as a {writer.trade} goes well.",
        "I write to you from {writer:person@friend}{writer.town}, where I have found work as a "
        "{writer.trade}. {writer.pet} the {writer.animal} is with me.",
    ),
    "letter_question": (
        "How is {friend.pet}? I have never met another {friend.animal} like that.",
        "Do you still make {friend.dish}? I often think of it.",
        "Are you still the best {friend.trade} in {friend.town}?",
    ),
    "letter_visit": (
        "Come and see me in {season@friend}. I will cook {writer.dish}, and you can tell me what "
        "you have done with the rest of the {parcel}.",
        "I will visit you in {friend.town} soon, and I will bring you some {writer.dish}.",
    ),
    "letter_close": ("Your friend", "With many greetings", "Yours"),
    "letter_home": (
        "I am writing to tell you that I have found your {lost=treasure@reader}. It was in my "
        "house, because {friend.pet} the {friend.animal} had hidden it.",
        "Do you remember the {lost=treasure@reader} that you lost? {friend.pet} the "
        "{friend.animal} has found it in the garden.",
    ),
    "letter_visit_home": (
        "I will send the {lost} to {reader.town} with the next cart. Give my greetings to "
        "{reader.pet}, and save a little {reader.dish} for me.",
        "You can fetch the {lost} here in {friend.town}. I will make {friend.dish} for you.",
    ),
    "list": (
        "Things that {hero=person@8} the {hero.trade} wants to buy in {hero.town}:\n\n"
        "1. {a=food@hero}\n2. {b=food@a}\n3. {c=food@b}\n{longer_list}\n{list_end}",
        "What to take on a journey to {goal=town@4}:\n\n1. {a=tool@goal}\n2. {b=tool@a}\n"
        "3. {c=tool@b}\n\nAnd if there is still room in the bag, take {d=food@goal}. In {goal}, "
        "{goal.where}, it is hard to find. But {goal.goods} you can buy there.",
        "How to make {hero:person@3}{hero.dish} like {hero} the {hero.trade}:\n\n1. Wash your "
        "hands.\n2. Take {a=food@hero} and {b=food@a}.\n3. Mix the {a} with the {b} and wait for "
        "{number_word} minutes.\n4. Put everything on the fire.\n5. Give the first spoon to "
        "{hero.pet} the {hero.animal}.\n\nIt tastes best in {season@hero}.",
    ),
    "longer_list": ("4. {d=food@c}\n5. {e=food@d}\n", "", "4. {d=food@c}\n"),
    "list_end": (
        "The {a} and the {c} are for {hero.pet} the {hero.animal}. With the {b} {hero} makes "
        "{hero.dish}.",
        "{hero} paid with a {coin=treasure@hero} and carried the {a}, the {b} and the {c} home.",
    ),
    "almanac": (
        "The town of {town=town@1} lies {town.where} in {country_of}. It is known for "
        "{town.goods}, and "
        "on {town.day} there is a market near {town.landmark}. {people_there}\n\n{legend@town}",
        "If you travel to {town=town@3}, you will first see {town.landmark}. The town lies "
        "{town.where} in {country_of}. {people_there}\n\n{legend@town}",
    ),
    "country_of": ("{town.country}", "the country of {town.country}"),
    "people_there": (
        "The best known person there is {hero=person@town}, a {hero.trade}. {hero.He} has a "
        "{hero.animal} called {hero.pet}, and {hero.his} {hero.dish} is famous.",
        "There {hero=person@town} the {hero.trade} shows visitors the way, together with "
        "{hero.pet} the {hero.animal}.",
    ),
    "legend": (
        "People say that a {lost=treasure@town} is hidden near {town.landmark}. Many have looked "
        "for it, and even {hero} has dug a hole or two. But nobody has found the {lost} of "
        "{town} yet.",
        "In old times there was a year when nobody in {town} had any {food=food@town} left. "
        "Then a stranger came with {number_word@town} carts full of {food}, and since then the "
        "people of {town} give a piece of bread to every stranger.",
        "On the longest night of the year all lamps in {town} are put out, and the children walk "
        "to {town.landmark} and sing. {hero} the {hero.trade} always lights the first lamp again.",
    ),
}
