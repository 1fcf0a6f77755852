"""The build hook of pyproject.toml: compiles the attention kernel into the wheel, or in place.

Without a C++ compiler the install goes on, and workers compute attention with SDPA.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("kvrelay/engine/attention/native")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling looks for this name
    """Compiles in the source tree: a second build of the same sources compiles nothing."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Add the objects to a wheel, which is then one for this platform."""
        compiling = _compiling(Path(self.root))
        try:
            made, failed = compiling.build()
        except (compiling.BuildError, OSError) as error:
            self.app.display_warning(f"the attention kernel was not compiled: {error}")
            return
        for name, complaint in failed.items():
            self.app.display_warning(f"not compiled: {name}: {complaint}")
        if version == "editable":
            return
        build_data["force_include"] = {str(path): str(NATIVE / path.name) for path in made}
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _compiling(root: Path) -> ModuleType:
    """The module that compiles: nothing is installed yet."""
    spec = importlib.util.spec_from_file_location(
        "kvrelay_native_build", root / NATIVE / "build.py"
    )
    if spec is None or spec.loader is None:
        raise ImportError(str(root / NATIVE / "build.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
