"""Judge a draft answer from a file: every error at once, and exit code 4 when there is one."""

from __future__ import annotations

import json
from pathlib import Path

from runtime.advisor import kb as knowledge
from runtime.advisor.validator import check_answer
from runtime.errors import UsageError, UserError
from stages.stage import Stage, StageContext


class RejectedError(UserError):
    """A draft with errors."""

    exit_code = 4


def run(ctx: StageContext) -> None:
    """Print the result as JSON. Raises RejectedError when the draft is not right."""
    advise = ctx.cfg.advise
    assert advise.answer is not None, "the schema asks for it"
    path = Path(advise.answer).expanduser()
    try:
        answer = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "set advise.answer to a text file") from error  # fmt: skip
    found = check_answer(
        knowledge.load(), answer, last_user_message=advise.last_message or "", searched_web=advise.searched_web,
    )  # fmt: skip
    print(json.dumps(found, indent=1, ensure_ascii=False), flush=True)
    if not found["ok"]:
        codes = ", ".join(dict.fromkeys(e["code"] for e in found["errors"]))
        raise RejectedError(
            f"the draft has {len(found['errors'])} errors: {codes}", "mend them and check again"
        )


STAGE = Stage(name="advise_check", run=run, is_endpoint=True)
