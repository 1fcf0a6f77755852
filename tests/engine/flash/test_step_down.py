"""A worker's self-test on the real runner, where a library's stand-in is right, wrong or absent."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from kvrelay.engine.graphs import Graph
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.step_down import DeviceExaminer, Way, choose_way
from tests.engine.flash import standins
from tests.models import tiny_model

FACTS = ("rows-same", "cuts-same")


class NoGraphs:
    """Captures nothing."""

    def capture(self, function: Callable[[], object]) -> Graph:
        raise RuntimeError("no graphs here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Heads of 16 numbers."""
    path = tiny_model("llama", tmp_path_factory.mktemp("model") / "llama", hidden_size=64)
    return load_model(path, "float32", "cpu")


def way_of(model: LoadedModel, asked: str = "auto", size: int = 256) -> Way:
    return choose_way(asked, DeviceExaminer(model, size, NoGraphs))


def wrong(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A call that is off by a hundredth."""
    own = getattr(standins, name)
    monkeypatch.setattr(standins, name, lambda *given, **named: own(*given, **named) + 0.01)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", standins.varlen_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", standins.flash_attn_module())


def test_the_first_library_that_is_right(
    standing_in: None, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong one is a reason with what was seen."""
    way = way_of(model)
    assert (way.name, way.facts) == ("varlen", FACTS)
    (reason,) = way.reasons
    assert reason.startswith("triton cannot be used: ")
    wrong(monkeypatch, "varlen_attn")
    way = way_of(model)
    assert (way.name, way.facts) == ("flash_attn", FACTS)
    assert way.reasons[1].startswith(
        "varlen: attention: differs from SDPA by 1.5e-01 of a row's largest at most"
    )
    wrong(monkeypatch, "flash_attn_with_kvcache")
    way = way_of(model)
    assert (way.name, way.facts) == ("sdpa", FACTS)
    assert way.reasons[2].startswith(
        "flash_attn: attention: differs from SDPA by 1.2e-01 of a row's largest at most"
    )


def test_what_a_kernel_does_not_compute_is_seen(
    standing_in: None, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one row is no smaller than any limit."""
    own = standins.varlen_attn

    def leaving_out(*given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        out = own(*given, **named)  # type: ignore[arg-type]
        out[-1, -1, -1] = torch.nan
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", leaving_out)
    assert (
        "varlen: attention: differs from SDPA by nan of a row's largest at most"
        in way_of(model).reasons
    )


def test_where_no_library_can_be_used(model: LoadedModel) -> None:
    """A worker's blocks of 16 positions: the reason says what to change."""
    way = way_of(model, size=16)
    assert (way.name, way.facts) == ("sdpa", FACTS)
    assert way.reasons[1].endswith("; block size 16: must be a multiple of 256 (--block-size 256)")
    assert way.reasons[2] == "flash_attn cannot be used: the package flash_attn is not installed"
    assert way_of(model, "sdpa") == Way("sdpa", facts=FACTS)


def replaced(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """A varlen_attn whose result is what ``change`` makes of Q's rows' result and of K's pool."""
    own = standins.varlen_attn

    def changed(*given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return change(own(*given, **named), given[1])  # type: ignore[arg-type]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", changed)


def test_a_kernel_that_reads_behind_the_end(
    standing_in: None, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no weight: only what is not a number shows it."""
    replaced(monkeypatch, lambda out, key: out + 0 * key[-1, -1].sum())
    assert (
        "varlen: attention: differs from SDPA by nan of a row's largest at most"
        in way_of(model).reasons
    )


def test_a_kernel_that_writes_elsewhere(
    standing_in: None, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a block of no entry."""

    def writing(out: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        key[-1, -1] = 1.0
        return out

    replaced(monkeypatch, writing)
    told = "varlen: attention: wrong K and V were stored, or in the wrong place"
    assert told in way_of(model).reasons


def test_a_kernel_that_is_wrong_in_the_model_alone(
    standing_in: None, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 50 rows, which are those of the model's prompt."""
    replaced(monkeypatch, lambda out, key: -out if len(out) == 50 else out)
    way = way_of(model)
    assert way.name == "flash_attn"
    assert way.reasons[1].startswith("varlen: model: logits differ from SDPA's by ")


@pytest.mark.parametrize(
    ("rows", "facts"), [(5, ("rows-differ", "cuts-same")), (43, ("rows-same", "cuts-differ"))]
)
def test_bits_that_depend_on_the_rows_of_a_call(
    standing_in: None,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    facts: tuple[str, str],
) -> None:
    """Five decode rows; a prompt that is cut after seven of fifty."""
    replaced(monkeypatch, lambda out, key: out * (1 + 1e-6) if len(out) == rows else out)
    way = way_of(model)
    assert (way.name, way.facts) == ("varlen", facts)
