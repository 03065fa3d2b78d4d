# SPDX-License-Identifier: Apache-2.0
"""The errors of the model. `fastcoll` turns them into its own where a group's call meets one."""


class ModelError(ValueError):
    """An input of the model is wrong, or the model cannot price it."""


class NotRunnableError(ModelError):
    """A schedule is right on paper, and this machine's executor cannot run it."""
