# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group find each other and get to each other's memory.

A group is made in this order: `launcher` finds a store, `exchange` gathers each rank's `identity`,
`node_map` derives the nodes, `rendezvous` connects a node's ranks into a `mesh`.
`farewell` tells peers why a rank gives up. `agreement` and `shrink` make a smaller group after a
loss.
"""
