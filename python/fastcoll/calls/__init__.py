# SPDX-License-Identifier: Apache-2.0
"""One call: its request, the checks of this rank, and the handle that it returns.

Arguments are checked in `tensors` (one tensor), `parts` (a part for each rank), `lists` (several
tensors as one message), `transfers` or `objects` (pickles). The accepted tensors and arrays are
defined in `arrays`. Arrays of CuPy's kind and their streams are in `foreign`. The handle and the
queue of calls that need Python are in `work`. The handles of sends and receives are in
`transfer_work`. The modules `recorder`, `dumps` and `sites` show a rank from outside.
"""
