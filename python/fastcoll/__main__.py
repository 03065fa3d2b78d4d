# SPDX-License-Identifier: Apache-2.0
"""`python -m fastcoll`: the command line."""

from fastcoll.cli import main

main()
