"""Settings whose value names a class: an entry of this package, or a class in a file of your own.

    --model.encoder.attention full                  a name
    --model.encoder.attention my_ideas.Window       class Window in my_ideas.py, in the working directory or installed

Names and class paths are plain strings in configs and checkpoints. Either can only import modules that this machine has, and
instantiate only subclasses of the registry's base class: a path decides which code runs, so trust it as you trust the config
or checkpoint that contains it.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import SettingError, UserError, first_line, meant
from .ranges import check_values


class UnknownKind(SettingError):
    """A name that stands for no suitable class."""


class Registry(Mapping):
    """The classes that a setting can name, by name.

    Args:
        setting: its name, for messages.
        base: the base class of every class, this package's or the user's.
        methods: every class must override at least one of these, if there are any.
        called: {another word for an entry: its name}, for `did you mean`.
    """

    def __init__(self, setting: str, base: type, methods: tuple[str, ...] = (), called: Mapping[str, str] | None = None):
        self.setting, self.base, self.methods, self.called = setting, base, methods, called or {}
        self._classes: dict[str, type] = {}

    def add(self, name: str) -> Callable[[type], type]:
        """Decorator: registers a class under that name."""

        def added(cls: type) -> type:
            self._classes[name] = cls
            return cls

        return added

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, name: str) -> type:
        return self._classes[name]

    def name(self, cls: type) -> str:
        """The setting's value for a class: the entry's name, or the class path."""
        known = next((name for name, entry in self._classes.items() if entry is cls), None)
        return known or f"{cls.__module__}.{cls.__qualname__}"

    def find(self, name: Any) -> Any:
        """The class of that name or path; raises UnknownKind, in one line, if there is none."""
        if isinstance(name, str) and name in self._classes:
            return self._classes[name]
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")) or "." not in name:
            self._refuse(name, meant(self.called.get(str(name).lower(), name), self))
        path, _, attribute = name.rpartition(".")
        module = self._import(name, path)
        try:
            found = getattr(module, attribute)
        except AttributeError as error:
            self._refuse(name, f", but module {path} has no {attribute}{meant(attribute, dir(module), f'{path}.')}", error)
        if not (inspect.isclass(found) and issubclass(found, self.base) and found is not self.base):
            self._refuse(name, f", which is no subclass of {self.base.__name__}")
        if self.methods and all(getattr(found, method) is getattr(self.base, method) for method in self.methods):
            self._refuse(name, f", which has no {self.methods[0]}")
        if self.methods:
            try:
                inspect.signature(found.forward).bind_partial(None, None, None)  # self, x and the mask
            except TypeError as error:
                self._refuse(name, ", whose forward takes no mask after x", error)
        return found

    def _import(self, name: str, path: str) -> Any:
        top = path.partition(".")[0]
        if top in sys.stdlib_module_names:  # importing some of them has side effects
            self._refuse(name, f", but {top} is Python's own")
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
                self._refuse(name, f", but there is no module {error.name} in the working directory, nor installed", error)
            self._refuse(name, f", but module {path} cannot be imported: {error}", error)
        except Exception as error:  # whatever the user's file raises
            self._refuse(name, f", but module {path} cannot be imported: {type(error).__name__}: {first_line(error)}", error)

    def _refuse(self, name: Any, why: str, error: Exception | None = None) -> None:
        package = self.base.__module__.rpartition(".")[0]
        entries = f"{', '.join(self)}, or " if self else ""
        own = f"the path of a subclass of {package}.{self.base.__name__}, as my_ideas.Idea"
        raise UnknownKind(self.setting, name, f"{entries}{own}", why) from error

    def _parameters(self, found: type) -> dict[str, tuple[Callable[..., Any], inspect.Parameter]]:
        """Arguments that the class takes, by name: the __init__ that declares it, and the parameter.

        With ``**more`` these include the parent class's, and so on up to an entry of this package.
        """
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters: dict[str, tuple[Callable[..., Any], inspect.Parameter]] = {}
        for cls in (one for one in found.__mro__ if "__init__" in vars(one)):
            _, *taken = inspect.signature(vars(cls)["__init__"]).parameters.values()
            parameters = {one.name: (vars(cls)["__init__"], one) for one in taken if one.kind in plain} | parameters
            if cls in self._classes.values() or not any(one.kind is one.VAR_KEYWORD for one in taken):
                break
        return parameters

    def defaults(self, found: type) -> dict[str, Any]:
        """The default of each argument of a class, including those of the package's class that it derives from."""
        base = next((cls for cls in found.__mro__ if cls in self._classes.values()), found)
        taken = self._parameters(base) | self._parameters(found)
        return {name: one.default for name, (_, one) in taken.items()}

    def check_options(self, name: str, taken: set[str], options: dict[str, Any] | None) -> None:
        """Raises ValueError for an option that the class ``name`` does not have, for a missing one, or for a bad value.

        taken: arguments that the encoder itself passes, which are no options.
        """
        options, found = options or {}, self.find(name)
        parameters = self._parameters(found)
        own = [one for one in parameters if one not in taken]
        for option in options:
            if option not in own:
                raise UserError(
                    f"{self.setting}_options names {option!r}", ", ".join(own) or "none", when=f"with {self.setting}={name}"
                )
        for option, value in options.items():
            check_values(f"{self.setting}_options.", parameters[option][0], {option: value})
        any_more = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(found.__init__).parameters.values())
        if not any_more and (refused := taken - parameters.keys()):
            takes = f", whose __init__ takes no {min(refused)}"
            raise SettingError(self.setting, name, "a class with `def __init__(self, …, **shape)`", more=takes)
        needed = (one for one in own if parameters[one][1].default is inspect.Parameter.empty)
        if missing := next((one for one in needed if one not in options), None):
            raise UserError(f"{self.setting}_options lacks {missing!r}", f"a value for it, since {name} has no default")


def check_shape(registry: Registry, module: Any, found: Any, shape: tuple[int, ...], why: str) -> None:
    """Raises UserError, naming the class, if ``found``, which its ``forward`` returned, is not a real tensor of that shape."""
    tensor = hasattr(found, "is_complex")
    if not tensor or found.shape != shape or found.is_complex():
        said = f"a tensor {tuple(found.shape)}" if tensor else f"a {type(found).__name__}"
        said += " of complex numbers" if tensor and found.is_complex() else ""
        raise UserError(
            f"forward of {registry.setting} {registry.name(type(module))} returns {said}", f"a tensor {shape}, {why}"
        )
