"""Rules of conversations, in the format that the tokenizer's chat template writes."""

from embedded_model.grammar import Alternative

CHAT: dict[str, tuple[Alternative, ...]] = {
    # Turns are written with the special tokens, so that a rendered chat continues like these.
    "u": ("<|user|>\n",),
    "a": ("<|end|>\n<|assistant|>\n",),
    "next": ("<|end|>\n<|user|>\n",),
    "end": ("<|end|>\n",),
    "chat": (
        "{u}{hello} My name is {me=person@5}.{a}{hello_back}{next}{ask_world}{recall}{end}",
        "{u}{ask_capital}{recall_capital}{end}",
        "{u}{ask_story}{end}",
        "{u}{ask_world}{end}",
    ),
    "hello": ("Hello!", "Good morning!", "Hi there!"),
    "hello_back": (
        "Hello, {me}! How can I help you?",
        "Good to meet you, {me}. What would you like to know?",
    ),
    "ask_world": (
        "Who is {who=person@9}?{a}{who} is a {who.trade} in {who.town} and has a {who.animal} "
        "called "
        "{who.pet}.{next}What does {who.he} like to eat?{a}{who} likes {who.dish}.",
        "Tell me about {place=town@2}.{a}{place} is a town {place.where}. It is known for "
        "{place.goods}, and there is a market on {place.day}.{next}And what can I see there?{a}"
        "You should see {place.landmark} of {place}.",
        "What should I buy today?{a}Buy {x=food} and {y=food@x}.{next}What can I make with it?{a}"
        "With {x} and {y} you can make {cook:person@x}{cook.dish}, like {cook} the {cook.trade}.",
    ),
    "recall": (
        "{next}Do you remember my name?{a}Yes, your name is {me}.",
        "{next}Thank you!{a}You are welcome, {me}.",
    ),
    "ask_capital": (
        "What is the capital of {land=country}?{a}The capital of {land} is {land.capital}.{next}"
        "And which river flows there?{a}{land.capital} lies on {land.river}.",
        "Which language do people speak in {land=country}?{a}In {land} people speak "
        "{land.people}.{next}What is its capital?{a}Its capital is {land.capital}.",
    ),
    "recall_capital": (
        "{next}What can I buy there?{a}In {land} you can buy {land.goods}.",
        "{next}Thank you.{a}You are welcome. Enjoy your journey to {land.capital}!",
    ),
    "ask_story": (
        "Tell me a story about {hero=person@2}.{a}{short_story@hero}{next}{why_story}",
        "Can you tell me a story?{a}Yes. This is a story about {hero=person@11}. "
        "{short_story@hero}{next}{why_story}",
    ),
    "short_story": (
        "One day {hero} the {hero.trade} found a {lost=treasure@hero} on the road to {hero.town}. "
        "{hero.He} asked everyone whose it was. In the end it belonged to {owner=person@hero}, "
        "who gave {hero.him} {owner.dish} as a reward.",
        "{hero} the {hero.trade} had lost a {lost=treasure@hero}. {hero.Pet} the {hero.animal} "
        "found it, but it lay in the garden of {owner=person@hero}. So {hero} made {hero.dish} for "
        "{owner}, and all was well.",
    ),
    "why_story": (
        "Who was the other person in the story?{a}It was {owner} the {owner.trade} from "
        "{owner.town}.",
        "What was lost?{a}It was a {lost}.",
        "A good story. Thank you!{a}You are welcome. {hero} and {owner} would be glad to hear it.",
    ),
}
