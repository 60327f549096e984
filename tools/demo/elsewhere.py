"""Questions about all the world that is not tk, made by rule, so that the model learns when to pass."""

from __future__ import annotations

import random
import re

from tools.demo.frames import THINGS

_KINDS = {
    "food": """
        bread|rice|soup|curry|pancakes|lasagna|salad|noodles|sushi|pizza dough|a steak|fried eggs|an omelette|dumplings|
        tacos|a cheesecake|apple pie|hummus|paella|risotto|muffins|cookies|a smoothie|jam|yoghurt|tofu|porridge|gravy|
        roast chicken|mashed potatoes|ice cream|tea|coffee|lemonade|a burger|meatballs|ramen|guacamole|pickles
        """,
    "person": """
        Napoleon|Mozart|Einstein|Picasso|Beyonce|Messi|Ronaldo|Obama|Churchill|Gandhi|Tolstoy|Homer|Aristotle|Marie Curie|
        Galileo|Tesla|Bill Gates|Steve Jobs|Madonna|Michael Jackson|the pope|the queen|Batman|Harry Potter|Frodo|
        Sherlock Holmes|Cleopatra|Buddha|Confucius|Kafka|Dickens|Hemingway|Rembrandt|Monet|Bach|Chopin|Adele|Federer|
        my teacher|my neighbour|Santa Claus|Darth Vader|Nelson Mandela|Joan of Arc|Rihanna|Da Vinci|Columbus|Kant
        """,
    "place": """
        Paris|London|Berlin|Rome|Madrid|Tokyo|New York|Moscow|Cairo|Sydney|Vienna|Prague|Lisbon|Athens|Dublin|Oslo|Beijing|
        Mumbai|Nairobi|Toronto|Chicago|Texas|California|Germany|Italy|Spain|Japan|India|China|Mexico|Peru|Chile|Cuba|Kenya|
        Egypt|Turkey|Greece|Poland|Sweden|Norway|Finland|Iceland|Scotland|Ireland|Africa|Asia|Europe|Antarctica|Hawaii|
        the Alps|the Sahara|Mars|Venus|Jupiter|the moon|the sun|Mount Fuji|the Nile|the Amazon|Vietnam|Thailand|Portugal
        """,
    "animal": """
        dogs|cats|horses|whales|sharks|snakes|bees|ants|spiders|birds|eagles|owls|penguins|bears|wolves|lions|tigers|zebras|
        frogs|turtles|dolphins|octopuses|mosquitoes|butterflies|chickens|cows|pigs|sheep|goats|camels|kangaroos|fish|mice
        """,
    "science": """
        gravity|photosynthesis|evolution|electricity|magnetism|relativity|entropy|an atom|a molecule|DNA|a virus|bacteria|
        a black hole|a galaxy|a supernova|an eclipse|a rainbow|thunder|a volcano|an earthquake|a tsunami|the ozone layer|
        climate change|plate tectonics|a prime number|an integral|a derivative|a matrix determinant|algebra|trigonometry|
        pi|the periodic table|hydrogen|oxygen|carbon|gold|iron|plastic|penicillin|a vaccine|insulin|cholesterol|protein|
        the heart|the liver|the lungs|a kidney|blood pressure|diabetes|cancer|asthma|flu|a migraine|sleep|dreams
        """,
    "abstract": """
        love|justice|democracy|happiness|freedom|truth|beauty|money|inflation|capitalism|socialism|religion|philosophy|art|
        friendship|marriage|death|war|peace|history|music|poetry|literature|football|chess|tennis|golf|yoga|meditation|
        fashion|tourism|politics|the election|the economy|the stock market|bitcoin|taxes|insurance|a mortgage|a pension|
        the Olympics|Christmas|Easter|Ramadan|Halloween|the Renaissance|the Middle Ages|the Cold War|World War II|the Vikings
        """,
    "tech": """
        kubernetes|docker compose|git|github|SQL|postgres|mysql|mongodb|redis|excel|powerpoint|word|photoshop|javascript|
        typescript|react|angular|html|css|php|java|rust|golang|swift|android|an iphone|windows|macos|ubuntu|wifi|bluetooth|
        a printer|wordpress|linux permissions|regular expressions|a for loop|recursion|a linked list|quicksort|blockchain|
        a VPN|a firewall|terraform|ansible|aws|azure|spark|hadoop|pandas|matplotlib|unity|minecraft|a raspberry pi|netflix
        """,
    "doing": """
        learn Spanish|play the guitar|swim|ski|dance|sing|draw a face|knit a scarf|sew a button|fix a flat tire|
        repair a bicycle|paint a wall|clean an oven|remove a stain|iron a shirt|tie a tie|fold a napkin|grow roses|
        water a cactus|train a dog|raise a child|change a diaper|lose weight|build muscle|run a marathon|sleep better|
        quit smoking|stop worrying|find a job|write a resume|ask for a raise|start a business|buy a house|rent a flat|
        sell a car|book a hotel|pack a suitcase|get a visa|renew a passport|file my taxes|open a bank account|invest money|
        save money|write a novel|write a poem|give a speech|make friends|apologize|plan a wedding|choose a gift|
        get rid of mice|unclog a sink|hang a picture|build a shed|sharpen a knife|boil an egg|bake a cake|peel a mango|
        open a bottle of wine|make fire|catch a fish|ride a horse|drive a car|fly a kite|solve a crossword|win at poker
        """,
    "work": """
        a poem|a song|a haiku|an essay|a letter|a speech|a novel|a play|a cover letter|a birthday card|a business plan|
        a press release|an email to my boss|a wedding toast|a limerick|a blog post|a product description|a love letter|
        a thank you note|a complaint|a screenplay|a rap|a diary entry|an obituary|a shopping list|a meal plan|a resume
        """,
}
_TOPICS = {
    kind: tuple(" ".join(text.split()).replace("| ", "|").split("|"))
    for kind, text in _KINDS.items()
}

_QUESTIONS = """
how do I {make|cook|prepare|bake|serve} <food>
what goes into <food>
{recipe for|ingredients of|calories in} <food>
is <food> healthy
who {is|was} <person>
{tell me about|what do you know about|when was <person> born, and what about} <person>
{what did|why did|how did} <person> {do|die|become famous|say|live}
is <person> still alive
how {old|tall|rich|famous} is <person>
{where|what} is <place>
{what is the capital of|how many people live in|how do I get to|what language do they speak in|who governs} <place>
{what can I see in|is it worth visiting|what is the weather in|how far is it to|how big is} <place>
{best|cheap} {hotels|restaurants|museums|beaches} in <place>
tell me {something|a fact|the history} {about|of} <place>
{what do|where do|how do} <animal> {eat|live|sleep|hunt|breed}
{how long|how fast|how much} do <animal> {live|run|sleep|weigh|eat}
{are|why are} <animal> {dangerous|intelligent|afraid of <animal>|protected}
what is <science>
{explain|define|describe} <science>
{how does|what causes|who discovered|why does} <science> {work|happen|matter|}
what is <abstract>
{explain|describe|what do you think about|tell me about|why do people care about} <abstract>
{when did|why did|how did} <abstract> {begin|start|end|change}
how do I {use|install|learn|fix|uninstall|set up|debug} <tech>
{what is|explain|how does one learn|is it hard to learn} <tech>
{compare|what is better,} <tech> {and|or} <tech>
write {code|a program|a function|an example} {in|with|for} <tech>
how do I <doing>
{how can I|how to|teach me to|what is a good way to|tips to|help me to|I want to} <doing>
{can you|could you|please} <doing> for me
what do I need to <doing>
{write|compose|draft|improve|correct} <work>
{write|compose} <work> {about|for} {<place>|<person>|<abstract>|<animal>|my mother|my team}
what is the {best|biggest|oldest|cheapest|most famous|population|currency|color|price|history} {of <place>|in <place>}
{should I|may I|is it legal to|when should I} <doing>
what's the {difference|relation|connection} between <abstract> and <abstract>
what's the {difference|distinction} between <food> and <food>
{where can I buy|how much costs|who invented|what is the price of} <things>
{translate|spell|pronounce} <things> {|in French|in German|into Spanish}
what {color|size|shape} is {a|the} <things>
{why do|when do|how often do} {people|children|we|women|men} {like|buy|need|fear} <things>
what is <unheard>
who is <Unheard> <Unheard>
what does <unheard> mean
{where is|tell me about|explain|have you heard of|what do you know about} <Unheard>
how do I {use|get to|pronounce|install} <unheard>
<unheard> <unheard>
"""
_SYLLABLES = [
    part.split("|")
    for part in (
        "b|bl|br|ch|cr|d|dr|f|fl|g|gr|h|j|k|kl|m|n|p|pl|pr|qu|r|s|sh|sk|st|t|th|tr|v|w|x|z",
        "||n|r|l|s|x|th|nd|rk|m|st|ck",
    )
]
_PATTERNS = tuple(line.strip() for line in _QUESTIONS.strip().splitlines())


def question(rng: random.Random) -> str:
    """A question that the model cannot answer, in lower case but for names."""
    text = rng.choice(_PATTERNS)
    while "{" in text:
        text = re.sub(r"\{([^{}]*)\}", lambda choice: rng.choice(choice[1].split("|")), text)
    text = re.sub(r"<(\w+)>", lambda kind: _topic(rng, kind[1]), text)
    return " ".join(text.split())


def _topic(rng: random.Random, kind: str) -> str:
    if kind == "things":
        return rng.choice(THINGS)
    if kind.lower() == "unheard":
        word = _unheard_word(rng)
        return word.capitalize() if kind == "Unheard" else word
    return rng.choice(_TOPICS[kind])


def _unheard_word(rng: random.Random) -> str:
    """A word that means nothing, such as plorvane."""
    begins, ends = _SYLLABLES
    syllables = (
        rng.choice(begins) + rng.choice("aeiouy") + rng.choice(ends)
        for _ in range(rng.choice((2, 2, 3)))
    )
    return "".join(syllables)
