"""The Merkle tree against the definitions of RFC 9162, and its proofs against every change of them."""

from __future__ import annotations

import pytest

from causeway_server.router.ledger.proofs import EMPTY, extends, includes, leaf_hash, node_hash
from causeway_server.router.ledger.tree import Frontier, Tree

RECORDS = [f"record {number}".encode() for number in range(21)]
LEAVES = [leaf_hash(record) for record in RECORDS]
# Published with RFC 6962's reference implementation, whose hashes RFC 9162 keeps.
VECTORS = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOT = "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


def defined(leaves: list[bytes]) -> bytes:
    """The root as 2.1.1 defines it."""
    if len(leaves) < 2:
        return leaves[0] if leaves else EMPTY
    split = max(power for power in (1, 2, 4, 8, 16) if power < len(leaves))
    return node_hash(defined(leaves[:split]), defined(leaves[split:]))


def kept(start: int) -> Tree:
    """The tree whose first `start` records were deleted."""
    frontier = Frontier()
    for leaf in LEAVES[:start]:
        frontier.add(leaf)
    return Tree(frontier, LEAVES[start:])


def test_the_root_of_the_published_leaves() -> None:
    frontier = Frontier()
    for text in VECTORS:
        frontier.add(leaf_hash(bytes.fromhex(text)))
    assert frontier.root().hex() == ROOT


@pytest.mark.parametrize("start", range(0, 21, 3))
def test_each_root_and_proof_is_as_defined(start: int) -> None:
    tree = kept(start)
    for size in range(max(1, start), 22):
        root = tree.root(size)
        assert root == defined(LEAVES[:size])
        for index in range(start, size):
            proof = tree.inclusion(index, size)
            assert includes(RECORDS[index], index, size, root, proof)
            assert not includes(b"another record", index, size, root, proof)
            assert not includes(RECORDS[index], index ^ 1, size, root, proof) or size == 1
            assert not includes(RECORDS[index], index, size, root, [*proof, EMPTY])
        for old in range(max(1, start), size + 1):
            proof = tree.consistency(old, size)
            assert extends(old, defined(LEAVES[:old]), size, root, proof)
            assert not extends(old, EMPTY, size, root, proof)
            assert not extends(old, defined(LEAVES[:old]), size, EMPTY, proof)


def test_what_was_deleted_cannot_be_proved() -> None:
    tree = kept(6)
    with pytest.raises(ValueError, match="positions 6 to 20, but not the position 5"):
        tree.inclusion(5, 21)
    with pytest.raises(ValueError, match="sizes 6 to 21, but not the size 5"):
        tree.root(5)
    with pytest.raises(ValueError, match="sizes 6 to 21"):
        tree.consistency(5, 21)


def test_a_frontier_with_too_few_hashes_is_refused() -> None:
    with pytest.raises(ValueError, match="2 perfect subtrees, not 1"):
        Frontier(6, [EMPTY])


def test_proofs_of_an_empty_tree_prove_nothing() -> None:
    assert not includes(b"", 0, 0, EMPTY, [])
    assert not extends(0, EMPTY, 3, EMPTY, [])
    assert not extends(1, EMPTY, 1, EMPTY, [EMPTY])
    assert Frontier().root() == EMPTY
