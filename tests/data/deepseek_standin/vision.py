"""The vision tower: the stand-in has none."""


class VisionTransformer:
    def __init__(self, args):
        raise NotImplementedError("text only")
