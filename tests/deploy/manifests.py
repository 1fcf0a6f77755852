"""The manifests of deploy/kubernetes, read as far as the tests ask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from tests.deploy.rig import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
VLLM = ROOT / "deploy" / "kubernetes-vllm" / "kustomization.yaml"
Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | float | bool | None"
WORKLOADS = ("Deployment", "StatefulSet")


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a manifest; a wrong path fails with the path."""

    value: Json
    where: str = ""

    def __getitem__(self, key: str | int) -> Node:
        where = f"{self.where}.{key}"
        match self.value, key:
            case Mapping() as table, str() if key in table:
                return Node(table[key], where)
            case list() as row, int():
                return Node(row[key], where)
        raise AssertionError(f"{where} is missing")

    def get(self, key: str) -> Node:
        """The value under a key; an empty list if there is none."""
        return self[key] if isinstance(self.value, Mapping) and key in self.value else Node([])

    def __iter__(self) -> Iterator[Node]:
        assert isinstance(self.value, list), self.where
        return (Node(item, f"{self.where}[{at}]") for at, item in enumerate(self.value))

    def items(self) -> Iterator[tuple[str, Node]]:
        """Keys and values of a table."""
        assert isinstance(self.value, Mapping), self.where
        return ((key, Node(item, f"{self.where}.{key}")) for key, item in self.value.items())

    @property
    def text(self) -> str:
        assert isinstance(self.value, str), self.where
        return self.value

    @property
    def number(self) -> int:
        assert isinstance(self.value, int), self.where
        return self.value

    @property
    def texts(self) -> list[str]:
        return [each.text for each in self]


def read(name: str) -> list[Node]:
    """The documents of a file."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return [Node(each, name) for each in yaml.safe_load_all(text)]


def resources() -> list[Node]:
    """Every object that ``kubectl apply -k`` makes, without its secrets."""
    (kustomization,) = read("kustomization.yaml")
    return [each for name in kustomization["resources"].texts for each in read(name)]


def of_kind(*kinds: str) -> dict[str, Node]:
    """The objects of these kinds, by name."""
    found = [each for each in resources() if each["kind"].text in kinds]
    return {each["metadata"]["name"].text: each for each in found}


def pods() -> dict[str, Node]:
    """The pod template of each workload, by its name."""
    return {name: each["spec"]["template"] for name, each in of_kind(*WORKLOADS).items()}


def overlay() -> Node:
    """What ``VLLM`` changes."""
    return Node(yaml.safe_load(VLLM.read_text(encoding="utf-8")), VLLM.parent.name)


def with_vllm() -> dict[str, Node]:
    """The workloads as the overlay leaves them, by name."""
    found = of_kind(*WORKLOADS)
    for each in overlay()["patches"]:
        kind, name = each["target"]["kind"].text, each["target"]["name"].text
        chosen = [key for key, node in found.items() if re.fullmatch(name, key)]
        assert chosen, f"{name} is the name of nothing"
        for key in chosen:
            assert found[key]["kind"].text == kind
            found[key] = patched(found[key], Node(yaml.safe_load(each["patch"].text), key))
    return found


def patched(node: Node, operations: Node) -> Node:
    """What the operations ``add``, ``replace`` and ``test`` of RFC 6902 make of an object."""
    value = node.value
    for each in operations:
        path = [word.replace("~1", "/").replace("~0", "~") for word in each["path"].text.split("/")]
        value = _changed(value, path[1:], each["op"].text, each["value"].value)
    return Node(value, node.where)


def _changed(value: Json, path: Sequence[str], operation: str, new: Json) -> Json:
    assert operation in ("add", "replace", "test"), operation
    key, *rest = path
    if isinstance(value, list):
        at = len(value) if key == "-" else int(key)
        after = at if operation == "add" and not rest else at + 1
        old = value[at:after]
        return [*value[:at], _new(old, rest, operation, new), *value[after:]]
    assert isinstance(value, Mapping), f"{key} is not in {value!r}"
    old = [value[key]] if key in value else []
    return {**value, key: _new(old, rest, operation, new)}


def _new(old: Sequence[Json], rest: Sequence[str], operation: str, new: Json) -> Json:
    """What comes in the place of ``old``, which is empty if nothing is there."""
    assert old or (operation == "add" and not rest), "nothing is there"
    assert operation != "test" or rest or [*old] == [new], f"{old} is not {new}"
    return _changed(old[0], rest, operation, new) if rest else new


def container(pod: Node) -> Node:
    """The only container of a pod."""
    (found,) = pod["spec"]["containers"]
    return found


def labels_of(pod: Node) -> dict[str, str]:
    return {key: value.text for key, value in pod["metadata"]["labels"].items()}


def selects(selector: Node, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    if isinstance(selector.value, Mapping) and "matchLabels" in selector.value:
        wanted = {key: value.text for key, value in selector["matchLabels"].items()}
        if not wanted.items() <= labels.items():
            return False
    for each in selector.get("matchExpressions"):
        assert each["operator"].text == "In", each.where
        if labels.get(each["key"].text) not in each["values"].texts:
            return False
    return True
