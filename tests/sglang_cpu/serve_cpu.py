"""Run ``sglang.launch_server`` on a machine without a GPU; the arguments are the server's own.

SGLang imports ``sgl_kernel`` and ``torchvision`` (GPU kernels, images) wherever it runs. Here both
are stubs: every name in them imports, and calling one raises. This must stand at the top level of
the main module, for processes that are spawned run it again. transformers must have found out that
there is no torchvision before there is a stub of it.

The server's processes are forked here, not spawned: importing SGLang takes 7 seconds of CPU time,
and without a GPU there is nothing that a fork cannot take along.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers.utils

transformers.utils.is_torchvision_available()
STUBBED = ("sgl_kernel", "torchvision")


class _Missing(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise NotImplementedError("this server runs without sgl_kernel and torchvision")


class _Anything(metaclass=_Missing):
    pass


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - so that it has submodules

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Stubs())


def _without_pinned_memory() -> None:
    """Ignore requests for pinned memory, which only a GPU has and SGLang's LoRA always makes."""
    import torch

    def unpinned(function):
        def made(*args: object, pin_memory: bool = False, **kwargs: object) -> object:
            return function(*args, **kwargs)

        return made

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


if "--enable-lora" in sys.argv:
    _without_pinned_memory()

if __name__ == "__main__":
    import multiprocessing
    import runpy

    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)
    runpy.run_module("sglang.launch_server", run_name="__main__")
