"""Which vLLM engines are refused, and with which reason; namespaces, shards, options, rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from kvrelay.block.namespace import LAYOUT
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.vllm.kv.account import RequestAccount
from kvrelay.engine.vllm.kv.checks import EngineFacts, GroupFacts, check_engine
from kvrelay.engine.vllm.kv.facts import model_facts
from kvrelay.engine.vllm.kv.metrics import CounterDeltas, add_changes, described, ended
from kvrelay.engine.vllm.kv.namespace import (
    ModelFacts,
    namespace_of,
    revision_of,
    rotated_for,
    space_of,
)
from kvrelay.engine.vllm.kv.orders import LoadReport, RankReports, SaveReport
from kvrelay.engine.vllm.kv.setup import ConnectorConfig
from kvrelay.engine.vllm.kv.shards import HeadShards
from kvrelay.engine.vllm.rules import check_rules, rules_of, within
from kvrelay.errors import Rejected, Unservable
from kvrelay.sampling import Sampling
from kvrelay.structured import StructuredOutput
from kvrelay.usage import Miss
from tests.engine.vllm.rig import SPACE

GROUP = GroupFacts("FullAttentionSpec", 28, 32, 8, 128, 128, "bfloat16")
ENGINE = EngineFacts("kv_both", "recompute", (GROUP,))
MODEL = ModelFacts("org/model", "bfloat16", 32, commit="c0ffee")


def test_a_plain_engine_is_carried() -> None:
    check_engine(ENGINE)


WRONG: list[tuple[EngineFacts, str]] = [
    (replace(ENGINE, version_refusal="not tested"), "not tested"),
    (replace(ENGINE, role="kv_producer"), "kv_role is 'kv_producer'"),
    (replace(ENGINE, load_failure_policy="fail"), "kv_load_failure_policy is 'fail'"),
    (replace(ENGINE, pipeline_ranks=2), "2 pipeline ranks"),
    (replace(ENGINE, context_ranks=2), "context parallelism"),
    (replace(ENGINE, prefill_context_ranks=2), "context parallelism"),
    (replace(ENGINE, speculative=True), "speculative decoding"),
    (replace(ENGINE, groups=()), r"0 KV cache groups \(none\)"),
    (replace(ENGINE, groups=(GROUP, GROUP)), "2 KV cache groups"),
    (replace(ENGINE, groups=(replace(GROUP, kind="MambaSpec"),)), "MambaSpec"),
    (replace(ENGINE, groups=(replace(GROUP, non_causal=True),)), "not causal"),
    (replace(ENGINE, groups=(replace(GROUP, kind="MLAAttentionSpec"),)), "MLAAttentionSpec"),
    (replace(ENGINE, groups=(replace(GROUP, sliding_window=512),)), "window of 512"),
    (replace(ENGINE, groups=(replace(GROUP, chunked=True),)), "chunked"),
    (replace(ENGINE, groups=(replace(GROUP, dtype="uint8"),)), r"quantised KV cache \(uint8\)"),
    (replace(ENGINE, groups=(replace(GROUP, quantised=True),)), "quantised"),
    (replace(ENGINE, groups=(replace(GROUP, value_dim=64),)), "K of 128 and V of 64"),
    (replace(ENGINE, groups=(replace(GROUP, packed=True),)), "packs several heads"),
]


@pytest.mark.parametrize(("facts", "reason"), WRONG)
def test_what_cannot_be_carried_is_refused(facts: EngineFacts, reason: str) -> None:
    with pytest.raises(Unservable, match=reason):
        check_engine(facts)


def test_every_reason_is_given_at_once() -> None:
    facts = replace(ENGINE, role="kv_consumer", load_failure_policy="fail", speculative=True)
    with pytest.raises(Unservable, match=r"\(1\) kv_role.*\(2\) kv_load.*\(3\) speculative"):
        check_engine(facts)


@pytest.mark.parametrize(
    ("heads", "ranks", "count", "width"), [(8, 1, 1, 8), (8, 2, 2, 4), (8, 8, 8, 1), (2, 4, 2, 1)]
)
def test_ranks_share_the_heads(heads: int, ranks: int, count: int, width: int) -> None:
    shards = HeadShards(heads, ranks)
    assert (shards.count, shards.width) == (count, width)
    held = [shards.of_rank(rank) for rank in range(ranks)]
    assert held == sorted(held)
    assert set(held) == set(range(count))
    spaces = {shards.namespace(SPACE, shard).digest for shard in range(count)}
    assert len(spaces) == count
    assert (SPACE.digest in spaces) == (count == 1)


def test_shards_of_other_widths_have_other_names() -> None:
    two, four = HeadShards(8, 2), HeadShards(8, 4)
    assert two.namespace(SPACE, 0).digest != four.namespace(SPACE, 0).digest


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (3, 2), (6, 4), (0, 1)])
def test_heads_that_cannot_be_shared_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(Unservable, match="cannot be shared evenly"):
        HeadShards(heads, ranks)


def test_the_namespace_is_that_of_a_native_worker(tmp_path: Path) -> None:
    found = namespace_of(MODEL, lambda: "profile", {})
    assert (found.model, found.revision, found.layout) == ("model", "c0ffee", LAYOUT)
    assert (found.dtype, found.block_size, found.numerics) == ("bfloat16", 32, "profile")


def test_given_fields_count() -> None:
    def unneeded() -> str:
        raise AssertionError("the profile is given")

    given = {"model": "m", "revision": "r", "numerics": "", "dtype": "bfloat16", "block_size": 32}
    found = namespace_of(MODEL, unneeded, given)
    assert (found.model, found.revision, found.numerics) == ("m", "r", "")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tenant": "x"}, "namespace.tenant"),
        ({"model": 3}, "namespace.model"),
        ({"dtype": "float32"}, "namespace.dtype"),
        ({"block_size": 16}, "namespace.block_size"),
    ],
)
def test_wrong_fields_are_named(given: Mapping[str, object], field: str) -> None:
    with pytest.raises(Rejected) as caught:
        namespace_of(MODEL, lambda: "", given)
    assert caught.value.field == field


def test_the_revision_covers_what_vllm_was_told_to_change() -> None:
    told: list[Mapping[str, object]] = [
        {"quantization": None, "hf_overrides": {}, "disable_sliding_window": False},
        {"quantization": "fp8"},
        {"quantization": "fp8", "quantization_config": {"ignore": ["lm_head"]}},
        {"hf_overrides": {"rope_scaling": {"factor": 4}}},
        {"hf_overrides": {"rope_scaling": {"factor": 8}}},
        {"model_class_overrides": {"Qwen3ForCausalLM": "mine:Model"}},
        {"rotated_for": 4096},
        {"rotated_for": 8192},
        {"load_format": "dummy"},
    ]
    changed = [replace(MODEL, told=one) for one in told]
    changed.append(replace(MODEL, told=told[-1], commit="0ff1ce"))
    assert revision_of(changed[0]) == "c0ffee"
    assert len({revision_of(one) for one in changed}) == len(changed)
    with pytest.raises(Unservable, match="neither a folder nor a download"):
        revision_of(replace(MODEL, commit=None))
    with pytest.raises(Unservable, match=r'is a function, so its KV.*"revision"'):
        revision_of(replace(MODEL, unnamed="hf_overrides is a function"))


@pytest.mark.parametrize("field", ["model", "revision", "layout"])
def test_an_empty_name_is_no_default(field: str) -> None:
    with pytest.raises(Rejected, match="is empty"):
        namespace_of(MODEL, lambda: "", {field: ""})


def test_other_configurations_in_the_folder_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    model = replace(MODEL, model=str(tmp_path))
    found = {revision_of(model)}
    for text in ("{}", '{"rope_theta": 1}'):
        (tmp_path / "params.json").write_text(text)
        found.add(revision_of(model))
    assert len(found) == 3


LOADS = [("pt", True), ("instanttensor", False), ("tensorizer", True)]


@pytest.mark.parametrize(("load_format", "refused"), LOADS)
def test_loads_of_other_weights_have_no_name(
    tmp_path: Path, load_format: str, refused: bool
) -> None:
    """A commit fixes every file of a model; the name of a folder covers *.safetensors alone."""
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
    model = SimpleNamespace(
        model=str(tmp_path),
        quantization=None,
        quantization_config=None,
        model_class_overrides={},
        code_revision=None,
        config_format="auto",
        disable_sliding_window=False,
        hf_overrides={},
        hf_config_path=f"{tmp_path}/",
        hf_config=SimpleNamespace(_commit_hash="c0ffee"),
        hf_text_config=SimpleNamespace(),
        max_model_len=64,
    )
    config = SimpleNamespace(model_config=model, load_config=load)
    assert bool(model_facts(config, "float32", 16).unnamed) == refused
    model.model = "org/model"
    model.hf_config_path = None
    unnamed = model_facts(config, "float32", 16).unnamed
    assert bool(unnamed) == (load_format == "tensorizer")
    model.hf_overrides = str.upper
    assert "is a function" in model_facts(config, "float32", 16).unnamed


def test_weights_that_are_not_hashed_have_no_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(Unservable, match=r"has no config.json or \*.safetensors"):
        revision_of(replace(MODEL, model=str(tmp_path)))


def test_only_longrope_depends_on_the_longest_request() -> None:
    for given in ({"rope_type": "longrope"}, {"type": "longrope"}):
        assert rotated_for(SimpleNamespace(rope_scaling=given), 4096) == 4096
        assert rotated_for(SimpleNamespace(rope_parameters=given), 4096) == 4096
    assert rotated_for(SimpleNamespace(rope_parameters={"rope_type": "yarn"}), 4096) is None
    assert rotated_for(SimpleNamespace(), 4096) is None


def test_cache_salts_become_spaces() -> None:
    assert space_of(None) == space_of("") == b""
    assert space_of("0f" * 32) == b"\x0f" * 32
    others = {space_of("0F" * 32), space_of("0f" * 31), space_of("zz" * 32), space_of("alice")}
    assert len(others) == 4
    assert all(len(one) == 32 for one in others)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "store"),
        ({"store": ""}, "store"),
        ({"store": "none", "storage": 1}, "storage"),
        ({"store": "none", "namespace": "x"}, "namespace"),
        ({"store": "none", "audit": 1}, "audit"),
        ({"store": "none", "patience": 3}, "patience"),
    ],
)
def test_options_of_the_connector_are_checked(given: Mapping[str, object], field: str) -> None:
    with pytest.raises(Rejected) as caught:
        ConnectorConfig.of(given)
    assert caught.value.field == field


def test_reports_of_ranks_are_merged() -> None:
    reports = RankReports()
    reports.add(RankReports({("r", 1): LoadReport(8, None, (("a", 8),))}))
    assert not reports.take_complete(2)
    short = LoadReport(4, Miss.TOO_LATE, (("a", 4),))
    reports.add(RankReports({("r", 1): short}, {("r", 1, 1): SaveReport(3)}))
    done = reports.take_complete(2)
    assert done.loads == {("r", 1): LoadReport(4, Miss.TOO_LATE, (("a", 4),), 2)}
    assert not done.saves
    reports.add(RankReports(saves={("r", 1, 1): SaveReport(1)}))
    assert reports.take_complete(2).saves == {("r", 1, 1): SaveReport(1, 2)}
    assert not reports


def test_counters_are_told_as_changes() -> None:
    deltas = CounterDeltas()
    assert deltas.take(ConnectorCounters()) == {}
    assert deltas.take(ConnectorCounters(loads=3, open_loads=2)) == {"loads": 3, "open_loads": 2}
    assert deltas.take(ConnectorCounters(loads=3)) == {"open_loads": -2}
    assert add_changes({"a": 1}, {"a": 2, "b": 3}) == {"a": 3, "b": 3}
    account = RequestAccount(9, (), 5, 0, 0, {}, None, 0, None)
    assert ended(account) == {"failed_tokens": 5}
    assert ended(account).keys() <= described().keys()


def params(extra: object, temperature: float = 0.0, seed: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(extra_args={"kvrelay": extra}, temperature=temperature, seed=seed)


def test_rules_of_a_request() -> None:
    given = {
        "prompt_len": 7,
        "id": "x",
        "temperature": 0.5,
        "top_k": 3,
        "stop_token_ids": [4, 5],
        "logit_bias": {"11": 2},
        "bad_word_ids": [[1, 2], [3]],
        "logprobs": 5,
        "structured_output": {"choice": ["a", "b"]},
    }
    rules = rules_of(params(given))
    assert rules is not None
    assert (rules.prompt_len, rules.id) == (7, "x")
    assert rules.sampling == Sampling(
        temperature=0.5,
        top_k=3,
        stop_token_ids=(4, 5),
        logit_bias={11: 2.0},
        bad_word_ids=((1, 2), (3,)),
        structured_output=StructuredOutput(choice=("a", "b")),
    )
    assert rules_of(params(json.dumps(given))) == rules, "over HTTP it is a text"
    alone = rules_of(params({"seed": 3}))
    assert alone is not None
    assert alone.prompt_len is None
    assert rules_of(SimpleNamespace(extra_args=None, temperature=0.0, seed=None)) is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (params("x"), "must be an object"),
        (params("[" * 100_000), "must be an object"),
        (params("[1]"), "must be an object"),
        (params({"prompt_len": 1, "heat": 2}), "heat"),
        (params({}), 'needs a "seed"'),
        (params({"prompt_len": 0}), "prompt_len"),
        (params({"prompt_len": "7"}), "prompt_len"),
        (params({"id": 7}), "id"),
        (params({"prompt_len": 1, "temperature": -1.0}), "temperature"),
        (params({"prompt_len": 1, "top_p": "a"}), "extra_args"),
        (params({"seed": 7.5, "temperature": 1}), "seed"),
        (params({"seed": True, "temperature": 1}), "seed"),
        (params({"temperature": "1", "seed": 1}), "temperature"),
        (params({"temperature": 0, "top_k": 1.5}), "top_k"),
        (params({"temperature": 0, "ignore_eos": 1}), "ignore_eos"),
        (params({"temperature": 0, "min_tokens": 5, "eos_token_ids": [-3]}), "eos_token_ids"),
        (params({"temperature": 0, "stop_token_ids": [1.5]}), "stop_token_ids"),
        (params({"temperature": 0, "stop_token_ids": 5}), "stop_token_ids"),
        (params({"temperature": 0, "bad_word_ids": [[1.5]]}), "bad_word_ids"),
        (params({"temperature": 0, "bad_word_ids": [3]}), "bad_word_ids"),
        (params({"temperature": 0, "logit_bias": [1]}), "logit_bias"),
        (params({"temperature": 0, "logit_bias": {"-1": 1}}), "logit_bias"),
        (params({"temperature": 0, "stop": {"a": 1}}), "stop"),
        (params({"temperature": 0, "stop": ["x"]}), "stop.*services"),
        (params({"temperature": 0, "bad_words": ["x"]}), "bad_words.*services"),
        (params({"temperature": 0, "structured_output": {"regex": "a"}}), "structured_output"),
        (params({"temperature": 0, "structured_output": "x"}), "structured_output"),
        (params({"temperature": 0, "stop_token_ids": [7]}), "stop_token_ids.*vLLM's own"),
        (params({"temperature": 0, "ignore_eos": True}), "ignore_eos.*vLLM's own"),
        (params({"temperature": 0, "logprobs": 3}), "logprobs.*vLLM's own"),
        (params({"temperature": 0, "logit_bias": {"a": 1}}), "logit_bias"),
        (params({"temperature": 0, "logit_bias": {"5": None}}), "logit_bias"),
        (params({"temperature": 10**400, "seed": 1}), "temperature"),
        (params("x" * 5000), "must be an object.{1,120}$"),
        (params({"seed": 1}, temperature=1.0), "temperature must be 0"),
        (params({"seed": 1}, seed=3), "seed must be unset"),
    ],
)
def test_wrong_rules_are_refused_at_the_door(wrong: SimpleNamespace, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_rules(wrong)


def test_ids_that_the_model_has_not_are_left_out() -> None:
    """In the logits of a batch they would stand for ids of the next row."""
    given = {
        "temperature": 0,
        "min_tokens": 1,
        "logit_bias": {"9": 1, "10": 50},
        "stop_token_ids": [3, 10],
        "eos_token_ids": [10, 4],
        "bad_word_ids": [[1, 10], [2, 9]],
    }
    check_rules(params(given))
    rules = rules_of(params(given))
    assert rules is not None
    kept = within(rules, 10).sampling
    assert kept.logit_bias == {9: 1.0}
    assert (kept.stop_token_ids, kept.eos_token_ids) == ((3,), (4,))
    assert kept.bad_word_ids == ((2, 9),)
