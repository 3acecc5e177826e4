#!/bin/sh
# llguidance 1.9.1: building a tokenizer holds the GIL from beginning to end, although compiling a grammar gives it up.
#
# Guess: as `LLMatcher` compiles and computes masks without the GIL (so that servers may do it in a thread), the
# constructors of `LLTokenizer` do, too; a server that builds one in a thread beside its first request loses nothing.
# Seen: while `LLTokenizer.from_tiktoken` builds one of 150,000 tokens, a thread that only sleeps 1 ms at a time stands
# still for at least 80 % of the build, which takes some tenths of a second; `from_llamacpp` is the same. An engine that
# does so answers its first request that much later. While a matcher compiles a large schema the thread goes on.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/build.py" <<'PYTHON'
import itertools
import json
import string
import threading
import time

from llguidance import LLMatcher, LLTokenizer


def gap_of(work):
    """Return how long `work` takes, and how long another thread stood still meanwhile at most."""
    gaps, done = [0.0], threading.Event()

    def watch():
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.05)
    gaps.clear()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    time.sleep(0.01)
    done.set()
    watcher.join()
    return took, max(gaps)


letters = itertools.chain.from_iterable(itertools.product(string.ascii_letters.encode(), repeat=n) for n in (2, 3, 4))
words = [bytes([byte]) for byte in range(256)] + [bytes(word) for word in itertools.islice(letters, 150_000)]
encoder = {word: number for number, word in enumerate(words)}
special = {"<end>": len(words)}


def build():
    return LLTokenizer.from_tiktoken(
        encoder=encoder, special_tokens=special, pattern=r"\w+|\W+", eos_token=len(words), n_vocab=len(words) + 1
    )


tokenizer = build()
schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "maxLength": 20 + n} for n in range(400)}}
grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
built, stood = min((gap_of(build) for _ in range(3)), key=lambda pair: -pair[1] / pair[0])
compiled, waited = max((gap_of(lambda: LLMatcher(tokenizer, grammar)) for _ in range(3)), key=lambda pair: pair[0])
print(f"tokenizer: {built:.3f} s, another thread stood still for {stood:.3f} s")
print(f"grammar:   {compiled:.3f} s, another thread stood still for {waited:.3f} s")
assert stood > 0.8 * built > 0.02, "the tokenizer is built without the GIL"
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" "$folder/build.py"
