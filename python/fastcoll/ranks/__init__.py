# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program on this machine, and ends them.

Decides the CPUs and the environment of a rank, where its output goes, and which failure was first.
Must not know groups: a rank finds its peers by its environment, as under torchrun.
"""
