"""Generates the gRPC stubs before the packages are collected."""

from importlib.resources import files
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"


class BuildWithStubs(build_py):
    """Compiles protos/ into specdec/v1/, for wheels and editable installs alike."""

    def run(self) -> None:
        """Generates the stubs, then builds as usual."""
        from grpc_tools import protoc

        arguments = [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={ROOT}",
            f"--pyi_out={ROOT}",
            f"--grpc_python_out={ROOT}",
            *map(str, sorted(PROTOS.rglob("*.proto"))),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("the stubs of protos/ could not be generated")
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
