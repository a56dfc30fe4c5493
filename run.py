"""Compose the config, run the wanted stages, print errors without a traceback.

python run.py                                              set up the bundled tiny model, then serve it
python run.py stages=[chat] prompt="Tell me a story."      one answer on the terminal
python run.py --help                                       every group and key
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent
CONF = ROOT / "conf"
FREE_TEXT = (
    "prompt",
    "system",
    "model.path",
    "simulate.routes",
    "paths.outputs",
    "paths.artifacts",
    "paths.snapshots",
    "serve.api_key",
    "serve.api_key_file",
    "paths.hub",
    "paths.memory",
    "memory.store",
    "memory.file",
    "memory.question",
    "memory.session",
    "memory.tag",
    "memory.scope",
    "advise.question",
    "advise.model",
    "advise.system",
    "advise.answer",
    "advise.last_message",
)  # values that need no quoting

TAKES_VALUE = (  # Hydra's options whose next word is no override
    *("--cfg", "-c", "--info", "-i", "--package", "-p", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)


def main(argv: list[str]) -> int:
    """Run the command line. Returns the exit code: 0, 1 failure, 2 wrong use, 3 wrong bytes or numbers, 4 busy.

    Of the memory's stages: 3 LOW CONFIDENCE, 4 store refused, 5 store locked.
    """
    from conf.schema import ConfigError
    from runtime.errors import UserError

    signal.signal(signal.SIGTERM, _on_term)
    # on a small card holes between tensors are lost memory; read when torch first meets the GPU
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        sys.argv[1:] = prepare(argv)
        return _compose_and_run()
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, UserError) else 2
    except KeyboardInterrupt:
        print(
            "\nstopped; what is finished is kept, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        # nobody reads stdout any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _on_term(_signum: int, _frame: FrameType | None) -> None:
    print("terminated; what is finished is kept", file=sys.stderr)
    raise SystemExit(143)


def _compose_and_run() -> int:
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from conf.schema import RunConfig
    from stages.sweep import Outcome, gather, job

    ConfigStore.instance().store(name="schema", node=RunConfig)
    Outcome.forget()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of Hydra's own report and exit
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise _as_usage_error(error) from error
    finally:  # a sweep that was stopped shows what it has
        exit_code = gather()
    return max([exit_code, *Outcome.exit_codes])


def _as_usage_error(error: Exception) -> Exception:
    """Put Hydra's complaint about an override into one line, with what the grammar wants where we know it."""
    from runtime.errors import UsageError

    cause = str(error.__cause__ or "").partition("\n")[0]
    text = ": ".join(filter(None, (str(error).partition("\n")[0], cause)))
    if (word := getattr(error, "override", None)) is not None:
        text = f"cannot read {word!r}: {text}"
    if "ListConfig" in text or "stages=" in text:
        return UsageError(text, "a list is written in brackets: stages=[chat]")
    return UsageError(text, "`python run.py --cfg job` prints every key with its value")


# ---- the command line, before Hydra sees it --------------------------------------------------------------------------


def prepare(argv: list[str]) -> list[str]:
    """Check overrides and quote free text, so that nobody has to know Hydra's grammar to write a sentence.

    Raises UsageError for an unknown group choice or key, with the nearest right name, and for bad text.
    """
    from runtime.errors import UsageError

    for word in argv:
        if any(0xDC80 <= ord(c) <= 0xDCFF for c in word):
            raise UsageError(
                f"the argument {word.encode('utf-8', 'surrogateescape')!r} is not valid UTF-8",
                "set a UTF-8 locale (LC_ALL=C.UTF-8), or convert the text with iconv",
            )
    _check_outputs(argv)
    return [
        word if before in TAKES_VALUE else _prepare_override(word)
        for before, word in zip(["", *argv], argv, strict=False)
    ]


def _prepare_override(word: str) -> str:
    match = re.fullmatch(r"(\+{0,2}|~)([A-Za-z_][\w.@/]*)(=)?(.*)", word, re.DOTALL)
    if match is None or word.startswith("-"):
        return word
    prefix, key, equals, value = match.groups()
    if not key.startswith("hydra"):
        _check_key(prefix + key, key, value)
    if equals and key in FREE_TEXT and value not in ("null", ""):
        return f"{prefix}{key}={_quoted(value)}"
    return word


def _quoted(value: str) -> str:
    """Return Hydra's quoted form of a text, unless it is quoted already."""
    if re.fullmatch(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", value, re.DOTALL):
        return value
    value = re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", value)  # OmegaConf's grammar
    value = re.sub(r'(\\*)("|\Z)', lambda m: m[1] * 2 + (m[2] and '\\"'), value)  # Hydra's
    return f'"{value}"'


def _check_key(shown: str, key: str, value: str) -> None:
    from conf.schema import known_keys, nearest
    from runtime.errors import UsageError

    keys = known_keys()
    groups = {
        path.name for path in CONF.iterdir() if path.is_dir() and any(path.glob("*.yaml"))
    } - {"local", "advisor"}  # your own defaults; the advisor's documents
    if key in groups:
        choices = [path.stem for path in (CONF / key).glob("*.yaml")]
        for choice in filter(None, value.split(",")):
            if choice not in choices:
                raise UsageError(f"there is no {key}={choice}", nearest(choice, choices))
        return
    if key not in keys:
        parent = key.rpartition(".")[0]
        level = [k for k in keys if k.rpartition(".")[0] == parent] or [
            k for k in keys if "." not in k
        ]
        raise UsageError(f"unknown key {shown!r}", nearest(key, level))


def _check_outputs(argv: list[str]) -> None:
    """Say early that the output folder cannot be written: Hydra would end with a traceback."""
    from runtime.errors import UserError
    from stages.files import absolute

    if any(
        word in ("--help", "-h", "--cfg", "-c", "--info", "-i", "--hydra-help", "--version")
        for word in argv
    ):
        return
    given = [
        word.partition("=")[2].strip("'\"") for word in argv if word.startswith("paths.outputs=")
    ]
    outputs = absolute(given[-1] if given else "outputs")
    existing = next(path for path in (outputs, *outputs.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"the output folder {outputs} cannot be written",
            "set paths.outputs=DIR to a folder that you may write to",
        )


if __name__ == "__main__":
    logging.captureWarnings(True)
    sys.exit(main(sys.argv[1:]))
