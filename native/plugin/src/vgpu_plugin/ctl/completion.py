# SPDX-License-Identifier: Apache-2.0
"""Generates the completion scripts of vgpuctl for bash and zsh from its argument parser: commands, options and their
choices.
"""

from __future__ import annotations

import argparse

BASH = """\
# Completion of vgpuctl, made by: vgpuctl completion bash
_vgpuctl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command="" one
    for one in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        [[ $one == -- ]] && {{ COMPREPLY=($(compgen -o default -- "$word")); return; }}
        [[ -z $command && " {commands} " == *" $one "* ]] && command=$one
    done
    local words=""
    case "$command $before" in
{values}
        *)
            case "$command" in
{options}
            esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _vgpuctl vgpuctl
"""
ZSH = """\
#compdef vgpuctl
# Completion of vgpuctl, made by: vgpuctl completion zsh
autoload -U +X bashcompinit && bashcompinit
{bash}"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    commands = _commands(parser)
    values, options = [], [f'                "") words="{" ".join([*_options(parser), *commands])}" ;;']
    for name, one in commands.items():
        words = _options(one)
        for action in one._actions:
            choices = " ".join(map(str, action.choices or ()))
            if choices and not action.option_strings:
                words += choices.split()
            elif choices:
                values += [f'        "{name} {option}") words="{choices}" ;;' for option in action.option_strings]
        options.append(f'                {name}) words="{" ".join(words)}" ;;')
    text = BASH.format(commands=" ".join(commands), values="\n".join(values), options="\n".join(options))
    return text if shell == "bash" else ZSH.format(bash=text)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [one for action in parser._actions for one in action.option_strings if one.startswith("--")]
