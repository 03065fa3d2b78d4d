# SPDX-License-Identifier: Apache-2.0
"""`fastcoll build`: compile, once, the backend that fits only the installed torch.

Decides the output of the command. The compiler's call and the place of the build are in
fastcoll.integrations.c10d_build.
"""

import typer

from fastcoll.cli.console import end_without


def build() -> None:
    """Compile the backend of torch.distributed for the installed torch: a minute, once.

    Groups use it from then on, unless FASTCOLL_TORCH_BACKEND=python.
    """
    from fastcoll.integrations import c10d_build

    try:
        c10d_build.forget_failure()
        typer.echo(c10d_build.build())
    except (c10d_build.NotBuiltError, OSError) as error:
        end_without(f"not compiled: {error}")
