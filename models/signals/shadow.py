"""Shadow answers: records of requests that device and cloud answered, with agreement and features but no content.

The daemon writes the file (`shadow-2.sqlite` in its state folder), and `causeway-models calibrate --from-shadow` reads
it, also while the daemon runs.
"""

from __future__ import annotations

import msgspec

from causeway_server.router.types import Confidence, decode_row

from .pair import ModelIdentity

MAX_ANSWERS = 5000  # the newest are kept: about 6 MB
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY AUTOINCREMENT, answer BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS spend (id INTEGER PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS semantic (id INTEGER PRIMARY KEY, findings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS promises (id INTEGER PRIMARY KEY, records TEXT NOT NULL);
"""
PUT_ANSWER = (
    "INSERT INTO answers SELECT new, seal(?, 'answers', new) FROM (SELECT coalesce(max(id), 0) + 1 AS new FROM answers)"
)
NEWEST_ANSWERS = "SELECT opened(answer, 'answers', id) FROM answers ORDER BY id DESC LIMIT ?"
TRIM_ANSWERS = f"DELETE FROM answers WHERE id <= (SELECT max(id) - {MAX_ANSWERS} FROM answers)"


class ShadowAnswer(msgspec.Struct, frozen=True):
    """A request that both models of a pair answered."""

    small: ModelIdentity  # the device's model
    large: str  # the name of the cloud's model
    route: str  # the route that the decision took
    encoder_sha256: str  # the hash of the sentence encoder of `inputs`
    inputs: bytes  # the inputs of `edge.quality`, float32: structure of the prompt, then the encoder's vector
    agreed: bool  # whether the device's answer agrees with the cloud's
    confidence: Confidence | None = None  # of the device's first `after` tokens; None if it was not measured
    after: int = 0  # the number of tokens that the handoff waits for
    ended: bool = False  # `confidence` covers all tokens of the answer
    signals_sha256: str = ""  # the hash of the calibrated signals that estimated `quality` and `score`; "" for none
    quality: float | None = None  # `edge.quality` of the prompt
    score: float | None = None  # the probability that the handoff compares; both are without the device's refit
    kind: int = 0  # the number of the prompt's probable kind
    source: int = 0  # tells clients of one run of the daemon apart; the same for one client in 64


_decoder = msgspec.msgpack.Decoder(ShadowAnswer)


def decode_answer(data: object) -> ShadowAnswer | None:
    """Return the answer in a row of the file; None if it was written in another version's form."""
    return decode_row(_decoder, data)
