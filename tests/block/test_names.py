"""Names and namespaces: everything that should change a name does, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.errors import Rejected

SPACE = Namespace("m", "r", "float32", "block-major", 16, tenant_salt=b"salt")


def test_every_field_of_a_namespace_changes_its_digest() -> None:
    others = [
        dataclasses.replace(SPACE, model="n"),
        dataclasses.replace(SPACE, revision="s"),
        dataclasses.replace(SPACE, dtype="bfloat16"),
        dataclasses.replace(SPACE, layout="layer-major"),
        dataclasses.replace(SPACE, block_size=32),
        dataclasses.replace(SPACE, numerics="native/avx2"),
        dataclasses.replace(SPACE, format_version=4),
        dataclasses.replace(SPACE, fleet_key_id=b"fleet"),
        dataclasses.replace(SPACE, tenant_salt=b"pepper"),
    ]
    digests = {SPACE.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    assert len(others) == len(dataclasses.fields(Namespace))


def test_moving_a_boundary_between_fields_changes_the_digest() -> None:
    assert Namespace("ab", "c", "d", "l", 1).digest != Namespace("a", "bc", "d", "l", 1).digest


def test_digest_is_pinned() -> None:
    """Names are shared between machines and versions: a change here is a new format version."""
    assert SPACE.digest.hex() == PINNED_DIGEST
    namer = Namer(SPACE)
    assert namer.child(namer.root, range(16)).hex() == PINNED_NAME


def test_impossible_block_size_is_refused_by_name() -> None:
    with pytest.raises(Rejected, match="block_size: 0"):
        Namespace("m", "r", "float32", "block-major", 0)


def test_a_name_commits_to_namespace_parent_count_and_tokens() -> None:
    namer = Namer(SPACE)
    other = Namer(dataclasses.replace(SPACE, tenant_salt=b""))
    name = namer.child(namer.root, [1, 2, 3])
    assert len(name) == len(namer.root) == 32
    assert name == Namer(SPACE).child(namer.root, (1, 2, 3))
    different = [
        namer.child(name, [1, 2, 3]),
        namer.child(namer.root, [1, 2]),
        namer.child(namer.root, [1, 2, 3, 0]),
        namer.child(namer.root, [1, 3, 2]),
        namer.child(namer.root, []),
        other.child(namer.root, [1, 2, 3]),
        other.root,
        namer.root,
    ]
    assert len({name, *different}) == len(different) + 1


def test_chain_names_full_blocks_only() -> None:
    namer = Namer(SPACE)
    names = namer.chain(range(11), 4)
    first = namer.child(namer.root, range(4))
    assert names == [first, namer.child(first, range(4, 8))]
    assert namer.chain(range(3), 4) == []


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_id_that_is_no_u32_is_refused(token: int) -> None:
    namer = Namer(SPACE)
    with pytest.raises(Rejected, match="tokens"):
        namer.child(namer.root, [token])


def test_the_digest_can_be_replaced() -> None:
    def eight_bits(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()[:1].rjust(32, b"\0")

    namer = Namer(SPACE, digest=eight_bits)
    assert len({namer.child(namer.root, [token]) for token in range(2000)}) == 256


PINNED_DIGEST = "81fc33782e8484600b63988458650fd156d81bdaf2a231b8174d07fa1cca4fd3"
PINNED_NAME = "9ef9c6186a53e189cee0bef771b053c5a43e5bc190c2e8f028be1726dbbc7674"
