"""Prompts that the device's model should refuse: general questions, writing, code, small talk.

Templates with fillers make a few thousand distinct prompts, outside the functions of the device's catalogue.
"""

from __future__ import annotations

import random


def _list(joined: str) -> list[str]:
    return joined.split("|")


_TOPIC = _list(
    "photosynthesis|quantum computing|the french revolution|inflation|black holes|machine learning|the stock "
    "market|dna|"
    "world war two|the roman empire|climate change|electricity|gravity|blockchain|evolution|the water cycle|democracy|"
    "the big bang|antibiotics|plate tectonics|compound interest|the cold war|relativity|vaccines|supply and demand|"
    "neural networks|the immune system|volcanoes|the solar system|renewable energy|stoicism|jazz|impressionism|sql "
    "joins"
)
_THING = _list(
    "a poem|a short story|an essay|a cover letter|a haiku|a limerick|a speech|a blog post|a summary|a song|a product "
    "description|a thank you note|a resignation letter|a wedding toast|a business plan|a press release|a tweet|a "
    "recipe blog"
)
_CODE = _list(
    "a python function|a sql query|a bash script|a javascript class|a regex|a unit test|a c++ program|a rust struct|an "
    "html "
    "page|a css animation|a dockerfile|a makefile|a go routine"
)
_TASK = _list(
    "sort a list|reverse a string|parse json|find prime numbers|connect to a database|count words in a file|merge two "
    "arrays|read a csv|validate an email address|compute fibonacci numbers|scrape a web page|resize images|send a "
    "request"
)
_PERSON = _list(
    "einstein|napoleon|marie curie|shakespeare|cleopatra|gandhi|mozart|darwin|newton|picasso|lincoln|aristotle|tesla|"
    "galileo|beethoven|da vinci|columbus|churchill|socrates|turing"
)
_PLACE = _list("france|japan|brazil|egypt|canada|india|kenya|norway|peru|italy|mongolia|texas|spain|australia|greece")
_LANGUAGE = _list("french|spanish|german|japanese|italian|chinese|latin|korean|arabic|russian")
_PHRASE = _list(
    "good morning|where is the station|i love you|thank you very much|how much is this|see you tomorrow|i am "
    "hungry|happy "
    "birthday|what is your name|the cat is on the table"
)
_ANIMAL = _list("whales|octopuses|bees|eagles|dogs|penguins|sharks|ants|bats|elephants|frogs|horses")

_FILLERS = {
    "topic": _TOPIC,
    "thing": _THING,
    "code": _CODE,
    "task": _TASK,
    "person": _PERSON,
    "place": _PLACE,
    "language": _LANGUAGE,
    "phrase": _PHRASE,
    "animal": _ANIMAL,
}

# Open-ended tasks: outside the catalogues of both models.
OPEN_ENDED = (
    "write {thing} about {topic}",
    "write me {thing} about {animal}",
    "compose {thing} for {person}",
    "can you write {code} to {task}",
    "write {code} that can {task}",
    "how do i {task} in python",
    "fix this code so that it will {task}",
    "summarize this article about {topic}",
    "summarise the following text about {topic} in three sentences",
    "compare {topic} and {topic}",
    "what are the pros and cons of {topic}",
    "give me five ideas for {thing} about {topic}",
    "rewrite this paragraph to sound more formal",
    "explain {topic} like i am five",
    "discuss the impact of {topic} on {place}",
    "draft {thing} to my landlord about {topic}",
    "debate the ethics of {topic}",
    "act as {person} and tell me about {topic}",
    "prove that the square root of two is irrational",
    "what would happen if {animal} could talk",
    "should i invest in {topic}",
    "let us play a riddle about {animal}",
    "think step by step and solve this puzzle about {animal}",
    "outline a lecture on {topic}",
    "why do {animal} sleep",
    "create a study plan for {topic}",
    "what is the best way to learn {topic}",
    "how does {topic} affect {place}",
    "is there life after death",
    "do you believe in {topic}",
    "asdf qwer {animal} zxcv",
    "lorem ipsum dolor sit amet {topic}",
)
# Factual questions: the large assistant has functions for these (qa_*, translate), the device has none.
FACTS = (
    "what is the capital of {place}",
    "who was {person}",
    "when was {person} born",
    "tell me about {person}",
    "what did {person} discover",
    "explain {topic}",
    "what is {topic}",
    "how does {topic} work",
    "what is the history of {topic}",
    "how many people live in {place}",
    "translate {phrase} to {language}",
    "how do you say {phrase} in {language}",
    "what language do they speak in {place}",
    "how long do {animal} live",
    "what do {animal} eat",
    "who invented {topic}",
    "why is the sky blue",
    "how tall is mount everest",
    "how old are you",
    "are you a human",
    "what can you do",
    "who made you",
    "hello",
    "hi there",
    "good morning",
    "thanks",
    "how are you",
    "tell me a joke",
    "i am bored",
    "i feel sad today",
    "what is 12 times 14",
    "what is the square root of 144",
    "who won the world cup",
    "who is the president of {place}",
)


def open_ended_prompts(draw: random.Random, count: int, templates: tuple[str, ...] = OPEN_ENDED + FACTS) -> list[str]:
    """Return `count` prompts in varied casing and punctuation."""
    return [_restyle(draw, _fill(draw, draw.choice(templates))) for _ in range(count)]


def _fill(draw: random.Random, template: str) -> str:
    for name, fillers in _FILLERS.items():
        while f"{{{name}}}" in template:
            template = template.replace(f"{{{name}}}", draw.choice(fillers), 1)
    return template


def _restyle(draw: random.Random, text: str) -> str:
    style = draw.random()
    if style < 0.4:
        return text
    ending = (
        "?" if text.split()[0] in ("what", "who", "how", "why", "when", "is", "do", "can", "should", "are") else "."
    )
    capital = text[:1].upper() + text[1:]
    return capital + ending if style < 0.8 else capital
