"""What `--help` calls the arguments that stand by themselves: DATA and MODEL instead of STR."""

from typing import Annotated, Any


def _called(name: str) -> Any:
    try:
        from tyro.conf import arg
    except ImportError:  # the command line says what is missing; options can be made without it
        return name
    return arg(metavar=name)


DataPath = Annotated[str, _called("DATA")]
ModelFolder = Annotated[str, _called("MODEL")]
