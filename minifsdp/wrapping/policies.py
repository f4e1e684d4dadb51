"""Which modules become units: more policies.

auto_wrap.py says what a policy is. The one to use is ``ModuleWrapPolicy``.

The names and arguments are those of ``torch.distributed.fsdp.wrap``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from minifsdp.core import auto_wrap
from minifsdp.core.auto_wrap import has_forward
from minifsdp.wrapping.auto_wrap import Answer, Policy


class ModuleWrapPolicy(auto_wrap.ModuleWrapPolicy):
    """Wrap every module of the given classes in a unit of its own.

    Raises:
        TypeError: something given is not a class of modules.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        super().__init__(classes_of(module_classes, "ModuleWrapPolicy"))

    def __call__(self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0) -> bool:
        return recurse or super().__call__(module)


class CustomPolicy:
    """Ask a function about every module.

    Args:
        lambda_fn: takes a module. Returns a bool, or a dict of ``FullyShardedDataParallel``'s
            arguments for its unit, such as ``{"sharding_strategy": ...}``; an empty dict is False.

    Raises:
        TypeError: (a call does) the function returned something else.
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
    """Wrap every module that can be called, and look inside of containers. (torch wraps containers,
    too, and never gathers them.)"""
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
    classes = classes_of(transformer_layer_cls, "transformer_auto_wrap_policy")
    return recurse or isinstance(module, classes)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Policy]
) -> bool:
    """Wrap what any of these functions wants to wrap. Scripts import it by this name of torch's."""
    return any(p(module, recurse, nonwrapped_numel) for p in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap every module that has enough elements outside of units inside. This policy knows nothing
    of the model's structure, and may split a block. If there are blocks, use a policy of classes.

    Args:
        min_num_params: the least number of elements of a unit.
        force_leaf_modules: classes that are neither looked into nor wrapped, so that they are part
            of the unit around them; None: ``nn.MultiheadAttention``, which reads its children's
            weights without calling the children.
        exclude_wrap_modules: classes that are looked into and never wrapped. Containers that cannot
            be called are not wrapped in any case.
    """
    if nonwrapped_numel < min_num_params:
        return False  # nothing inside can be large enough either
    if recurse:
        leaves = _LEAVES if force_leaf_modules is None else force_leaf_modules
        return not isinstance(module, tuple(leaves))
    return has_forward(module) and not isinstance(module, tuple(exclude_wrap_modules or ()))


_LEAVES: set[type[nn.Module]] = {nn.MultiheadAttention}
# Programs extend torch's defaults: FORCE_LEAF_MODULES.union({Expert}).
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = _LEAVES  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {  # type: ignore[attr-defined]
    nn.ModuleList, nn.ModuleDict,
}  # fmt: skip


_context: tuple[Callable[..., nn.Module], dict[str, Any]] | None = None


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which :func:`wrap` wraps. For models that name their units in their ``__init__``
    and can also be built without sharding::

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
    """``module``, wrapped with the arguments of the :func:`enable_wrap` around this call and with
    ``wrap_overrides``, which take precedence. Outside of an ``enable_wrap``, ``module`` itself."""
    if _context is None:
        return module
    wrapper_cls, settings = _context
    return wrapper_cls(module, **{**settings, **wrap_overrides})


def classes_of(given: Iterable[type[nn.Module]], where: str) -> tuple[type[nn.Module], ...]:
    """These classes of modules; ``where`` is what they were given to.

    Raises:
        TypeError: something given is not a class of modules.
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"{where} takes a set of classes, as {{nn.Linear}}, not {given!r}")
    classes = tuple(given)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{where} takes classes of nn.Module, not {cls!r}")
    return classes
