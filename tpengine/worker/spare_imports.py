"""What a rank imports beside its own code, for the model that it runs."""

from __future__ import annotations

from tpengine.models.registry import import_fallback, import_vision_tower


def import_model_code(model_impl: str, picture_class: str | None) -> None:
    """Imports what a model needs beside the worker, for a spare or a template.

    Args:
        model_impl, picture_class: see `EngineConfig.model_code`.
    """
    if model_impl == "transformers":
        import_fallback()
    if picture_class is not None:
        import_vision_tower().import_class(picture_class)
