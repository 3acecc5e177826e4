#!/bin/sh
# aiperf 0.13.0 (transformers 5.24.0): with HF_HUB_OFFLINE=1 a tokenizer's folder is refused, which loads without it.
#
# Guess: `--tokenizer` takes a "local path", and a folder needs no hub, so the variable that forbids the hub changes
# nothing. It is what one sets for a machine without a network, where a folder is the tokenizer that works.
# Seen: in offline mode every name is looked up in the hub's cache. A path is not a repository's name, so it is refused
# with `HFValidationError`. Without the variable the same folder is read, and nothing is downloaded.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cat > "$folder/load.py" <<'PYTHON'
import sys

from aiperf.common.tokenizer import Tokenizer
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

words = Words(WordLevel({"light": 0, "door": 1, "?": 2}, unk_token="?"))
words.pre_tokenizer = Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(sys.argv[1])
try:
    print(Tokenizer.from_pretrained(sys.argv[1], resolve_alias=False).encode("door light"))
except Exception as error:
    print(type(error).__name__, str(error).split(": ")[1])
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 huggingface_hub==1.33.0
"$folder/venv/bin/pip" install --quiet --no-deps aiperf==0.13.0
export HF_HUB_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error
seen="without $("$folder/venv/bin/python" "$folder/load.py" "$folder/words" 2> "$folder/log")
with $(HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/load.py" "$folder/words" 2> "$folder/log")" || cat "$folder/log"
printf "%s\n" "$seen"
[ "$seen" = 'without [1, 0]
with TokenizerError HFValidationError' ]
