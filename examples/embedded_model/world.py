"""Who and what there is in the little world: people, towns, countries, things."""

from embedded_model.grammar import Alternative, Entity

_PRONOUNS = {
    "she": {"he": "she", "his": "her", "him": "her"},
    "he": {"he": "he", "his": "his", "him": "him"},
}


def _person(name: str, pronoun: str, trade: str, town: str, pet: str, dish: str) -> Entity:
    animal, pet_name = pet.split()
    return {
        "name": name,
        **_PRONOUNS[pronoun],
        "trade": trade,
        "town": town,
        "animal": animal,
        "pet": pet_name,
        "dish": dish,
    }


def _town(name: str, where: str, landmark: str, goods: str, country: str, day: str) -> Entity:
    return {
        "name": name,
        "where": where,
        "landmark": landmark,
        "goods": goods,
        "country": country,
        "day": day,
    }


def _country(name: str, capital: str, river: str, goods: str, people: str) -> Entity:
    return {"name": name, "capital": capital, "river": river, "goods": goods, "people": people}


PEOPLE: tuple[Entity, ...] = (
    _person("Mara", "she", "baker", "Orlen", "cat Pim", "honey bread"),
    _person("Tobin", "he", "fisherman", "Saltby", "dog Rusk", "fish soup"),
    _person("Elsa", "she", "clockmaker", "Highmoor", "parrot Minute", "plum cake"),
    _person("Oskar", "he", "miller", "Brookfield", "donkey Bruno", "apple pie"),
    _person("Nora", "she", "gardener", "Orlen", "hen Daisy", "bean stew"),
    _person("Hugo", "he", "ferryman", "Stonebridge", "goose Admiral", "onion soup"),
    _person("Ida", "she", "weaver", "Brookfield", "lamb Cotton", "warm porridge"),
    _person("Simon", "he", "shepherd", "Highmoor", "dog Bell", "goat cheese"),
    _person("Ruth", "she", "doctor", "Saltby", "cat Pepper", "lemon tea"),
    _person("Anton", "he", "lamplighter", "Stonebridge", "crow Soot", "roasted chestnuts"),
    _person("Clara", "she", "teacher", "Lindholm", "rabbit Comma", "berry jam"),
    _person("Jonas", "he", "carpenter", "Lindholm", "goat Nail", "potato cakes"),
)

TOWNS: tuple[Entity, ...] = (
    _town("Orlen", "on the river Lune", "the old bridge", "bread and honey", "Vessia", "Friday"),
    _town("Saltby", "on the grey coast", "the lighthouse", "fish and salt", "Norrow", "Monday"),
    _town("Highmoor", "high in the hills", "the clock tower", "wool", "Tarland", "Thursday"),
    _town("Brookfield", "near the great forest", "the mill", "flour", "Vessia", "Saturday"),
    _town("Lindholm", "on a small island", "the round church", "boats", "Norrow", "Tuesday"),
    _town("Stonebridge", "between two lakes", "the long pier", "lamps", "Tarland", "Sunday"),
)

COUNTRIES: tuple[Entity, ...] = (
    _country("France", "Paris", "the Seine", "bread and cheese", "French"),
    _country("Italy", "Rome", "the Tiber", "olives and pasta", "Italian"),
    _country("Vessia", "Orlen", "the Lune", "honey", "Vessian"),
    _country("Spain", "Madrid", "the Manzanares", "oranges", "Spanish"),
    _country("Germany", "Berlin", "the Spree", "clocks and cars", "German"),
    _country("Norrow", "Saltby", "the Wide Water", "salt", "Norrish"),
    _country("Portugal", "Lisbon", "the Tagus", "cork and tiles", "Portuguese"),
    _country("Austria", "Vienna", "the Danube", "music and cakes", "German"),
    _country("Tarland", "Highmoor", "the Cold Brook", "wool", "Tarlandish"),
)

WORLD: dict[str, tuple[Alternative, ...]] = {
    "person": PEOPLE,
    "town": TOWNS,
    "country": COUNTRIES,
    "season": ("spring", "autumn", "winter", "summer"),
    "day": ("Monday", "Friday", "Sunday", "Wednesday"),
    "weather": (
        "the sun was shining",
        "a soft rain was falling",
        "a cold wind blew from the north",
        "there was fog in all the streets",
        "the first snow lay on the roofs",
    ),
    "treasure": (
        "silver key",
        "red lantern",
        "little brass bell",
        "blue scarf",
        "wooden flute",
        "golden coin",
    ),
    "parcel": ("basket of eggs", "sack of flour", "jar of honey", "roll of cloth", "box of nails"),
    "food": ("bread", "apples", "cheese", "honey", "carrots", "eggs", "salt", "butter"),
    "tool": ("a rope", "a lamp", "a sharp knife", "a map", "a warm coat", "a bottle of water"),
    "feeling": ("happy", "tired", "proud", "curious", "a little afraid"),
    "number_word": ("three", "two", "seven", "four", "ten"),
}
