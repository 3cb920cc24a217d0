"""Format usage lines, and turn Typer's errors about arguments and commands into sentences like all other errors."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from typer import Typer
from typer.core import TyperCommand

from vitascope.errors import UserError, suggest_choice


class NamedCommand(NamedTuple):
    """A command and its full name, such as `vitascope data list`."""

    command: Any
    full_name: str


class _Command(TyperCommand):
    """A command whose usage line has the names of the arguments without braces, as the error messages do."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return ["[OPTIONS]", *(_get_display_name(parameter) for parameter in _list_arguments(self))]


def set_usage_line_of_all_commands(app: Typer) -> None:
    """Give all commands of the app and its groups the usage line of this program."""
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            set_usage_line_of_all_commands(group.typer_instance)


def is_usage_error(error: Exception) -> bool:
    """Whether this is one of Typer's errors. Its classes are private, and older versions use click's."""
    return type(error).__module__.startswith(("typer.", "click.")) and hasattr(error, "format_message")


def convert_usage_error(error: Any, root_command: Any, arguments: Sequence[str]) -> UserError:
    """Return the error as a sentence: what was asked, what is there, and what to do."""
    command, full_name = _find_deepest_known_command(root_command, arguments)
    match type(error).__name__:
        case "MissingParameter":
            text = _describe_missing_parameter(error.param, command, full_name)
        case "NoSuchOption":
            text = _describe_unknown_option(error.option_name, command, full_name)
        case "BadOptionUsage":
            text = f"{_end_sentence(error.format_message())} For its values, see: {full_name} --help"
        case _ if name := re.match(r"No such command '(.*?)'", error.format_message()):
            commands = [name for name, entry in command.commands.items() if not entry.hidden]
            unknown = _get_short_name(f"{full_name} {name[1]}")
            text = f"There is no command '{unknown}'. {suggest_choice(name[1], commands)}"
        case "BadParameter":
            text = f"{_end_sentence(error.format_message())} For help, see: {full_name} --help"
        case _:
            text = f"{_end_sentence(error.format_message())} Write: {_format_usage(command, full_name)}"
    return UserError(text)


def _find_deepest_known_command(root_command: Any, arguments: Sequence[str]) -> NamedCommand:
    """Return the command that the arguments call, or the last group before an unknown command."""
    command, full_name = root_command, "vitascope"
    for argument in arguments:
        if argument not in getattr(command, "commands", {}):
            break
        command, full_name = command.commands[argument], f"{full_name} {argument}"
    return NamedCommand(command, full_name)


def _describe_missing_parameter(parameter: Any, command: Any, full_name: str) -> str:
    name, help_text = _get_display_name(parameter), (parameter.help or "").strip().rstrip(".")
    kind = "option" if parameter.param_type_name == "option" else "argument"
    meaning = f" ({help_text[0].lower()}{help_text[1:]})" if help_text else ""
    text = f"{_get_short_name(full_name)} needs the {kind} {name}{meaning}. Write: {_format_usage(command, full_name)}"
    return text + _format_example_if_any(command, ", for example: ")


def _get_short_name(full_name: str) -> str:
    """Return the name without the program's, which starts every message."""
    return full_name.removeprefix("vitascope ")


def _format_example_if_any(command: Any, introduction: str) -> str:
    """Return the example of the command's help, with an introduction; empty if it has none."""
    example = re.search(r"Example: (.+)", command.help or "")
    return f"{introduction}{example[1].strip()}" if example else ""


def _describe_unknown_option(option: str, command: Any, full_name: str) -> str:
    options = [name.removeprefix("--") for name in _list_visible_long_options(command)]
    text = f"{_get_short_name(full_name)} has no option {option}. "
    if len(options) > 1:
        text += suggest_choice(option.lstrip("-"), options, prefix="--")
    else:
        text += f"Its only option is --{options[0]}." if options else "It has no options."
    if any("KEY=" in (parameter.metavar or "") for parameter in _list_arguments(command)):
        text += f" Write settings as KEY=VALUE{_format_example_if_any(command, ', for example: ')}"
    return text


def _format_usage(command: Any, full_name: str) -> str:
    if hasattr(command, "commands"):
        return f"{full_name} COMMAND"
    names = [_get_display_name(parameter) for parameter in _list_arguments(command)]
    options = [
        f"{parameter.opts[0]} VALUE"
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.required
    ]
    return " ".join([full_name, *names, *options])


def _list_arguments(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "argument"]


def _list_visible_long_options(command: Any) -> list[str]:
    return [
        name
        for parameter in command.params
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
        for name in [*parameter.opts, *parameter.secondary_opts]
        if name.startswith("--") and not name.endswith("-completion")
    ]


def _get_display_name(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return parameter.opts[0]
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required or name.startswith("[") else f"[{name}]"


def _end_sentence(text: str) -> str:
    return f"{text.strip().rstrip('.')}."
