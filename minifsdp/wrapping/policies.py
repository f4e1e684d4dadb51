"""Which modules become units: the policies.

A policy is asked about one module after another. Before looking inside: shall I? If so, then again
when all inside is done: does this one become a unit? (The root does, unasked.) It may answer the
second with a dict, of settings that this unit has different from the root. The names and arguments
are those of ``torch.distributed.fsdp.wrap``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Answer = bool | dict[str, Any]
Policy = Callable[..., Answer]
"""``policy(module=, recurse=, nonwrapped_numel=)``: with ``recurse`` whether to look inside
``module``, without whether to wrap it; ``nonwrapped_numel`` counts its elements that no unit inside
has taken."""


def has_forward(module: nn.Module) -> bool:
    """Containers, such as ``nn.ModuleList``, have none: there is no moment to gather them."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


class ModuleWrapPolicy:
    """Wrap every module of the given classes in a unit of its own.

    Raises:
        TypeError: something given is not a class of modules.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = _classes(module_classes, "ModuleWrapPolicy")

    def __call__(self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0) -> bool:
        return recurse or isinstance(module, self.module_classes)


class CustomPolicy:
    """Ask a function about every module, on its own.

    Args:
        lambda_fn: ``module -> bool``, or a dict of those settings of ``FullyShardedDataParallel``
            that this unit has different from the root, as ``{"sharding_strategy": ...}``; an empty
            dict is False.

    Raises:
        TypeError: when asked: the function returned something else.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], Answer]) -> None:
        self.lambda_fn = lambda_fn

    def __call__(
        self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0
    ) -> Answer:
        if recurse:
            return True
        answer = self.lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise TypeError(
                f"the function of CustomPolicy has to return a bool or a dict of settings; for "
                f"{type(module).__name__} it returned {answer!r}"
            )
        return answer


def always_wrap_policy(module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0) -> bool:
    """Wrap everything that can be wrapped: containers are only looked into. (torch wraps those too,
    and never gathers them.)"""
    return recurse or has_forward(module)


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Ask a function about every module: ``partial(lambda_auto_wrap_policy, lambda_fn=f)``."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """:class:`ModuleWrapPolicy` as a function, under the name that older programs use.

    Raises:
        TypeError: something given is not a class of modules.
    """
    classes = _classes(transformer_layer_cls, "transformer_auto_wrap_policy")
    return recurse or isinstance(module, classes)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Policy]
) -> bool:
    """What any of these functions wants. torch's name for it, with which scripts import it."""
    return any(p(module, recurse, nonwrapped_numel) for p in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap whatever has enough elements of its own. It knows nothing of the model's structure, so
    its borders may fall in odd places; a policy of classes is better where there are blocks.

    Args:
        min_num_params: elements that a unit should have at least.
        force_leaf_modules: neither looked into nor wrapped: they are part of whatever is around
            them; ``nn.MultiheadAttention`` by default, which reads its children's weights without
            calling them.
        exclude_wrap_modules: looked into, and never wrapped; containers by default.
    """
    if nonwrapped_numel < min_num_params:
        return False  # nothing inside can be large enough either
    if recurse:
        leaves = nn.MultiheadAttention if force_leaf_modules is None else tuple(force_leaf_modules)
        return not isinstance(module, leaves)
    if exclude_wrap_modules is None:
        return has_forward(module)
    return not isinstance(module, tuple(exclude_wrap_modules))


_context: tuple[Callable[..., nn.Module], dict[str, Any]] | None = None


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, :func:`wrap` wraps. For models that know where their borders are, and say so in their
    ``__init__``, but can be built without sharding too::

        with enable_wrap(wrapper_cls=FSDP, sharding_strategy=...):
            model = FSDP(Model())       # in there: self.layer = wrap(nn.Linear(8, 8))
    """
    global _context
    outer, _context = _context, (wrapper_cls, wrapper_kwargs)
    try:
        yield
    finally:
        _context = outer


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module``, wrapped with the settings of the :func:`enable_wrap` around this call, and these
    ones before them; outside of any, ``module`` itself."""
    if _context is None:
        return module
    wrapper_cls, settings = _context
    return wrapper_cls(module, **{**settings, **wrap_overrides})


def _classes(given: Iterable[type[nn.Module]], where: str) -> tuple[type[nn.Module], ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{where} takes a set of classes, as {{nn.Linear}}, not {given!r}")
    classes = tuple(given)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{where} takes classes of nn.Module, not {cls!r}")
    return classes
