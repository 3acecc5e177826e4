"""The function calls that the assistants answer with: the functions, the form of a call, and its scoring.

intents     intents of four public data sets -> function names
dataset     labelled rows (JSON lines) and the held-out split
call        a row's expected call, parsing and scoring of answers
catalog     the functions with their JSON schemas (`catalog.json`)

The grammar that restricts a call's arguments to words of the user's message is `models.constraints.grammars`.
"""
