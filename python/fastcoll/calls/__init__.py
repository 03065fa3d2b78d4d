# SPDX-License-Identifier: Apache-2.0
"""One call: its request, the checks of this rank, and the handle that it returns.

A verb's arguments are checked in `tensors` (one tensor), `parts` (a part for each rank), `lists`
(several tensors as one message), `pairs` (sends and receives) or `objects` (pickles). `arrays` says
which tensors and arrays are accepted, `foreign` which of CuPy's kind and in which stream. `work`
has the handle and the queue of calls that need Python, `transfers` those of sends and receives.
`recorder`, `dumps` and `sites` show a rank from outside.
"""
