"""The manifests of deploy/kubernetes, read as far as the tests ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from tests.deploy.rig import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
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
