"""x"""

from stages.core import Stage

STAGE = Stage(
    name="serve", run=lambda ctx: None, needs=lambda cfg: tuple(cfg.model.setup), is_endpoint=True
)
