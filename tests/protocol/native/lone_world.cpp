// SPDX-License-Identifier: Apache-2.0
// The library for the ranks of lone_world.h, once for all programs that have such ranks.
#include "lone_world.h"

template class fastcoll::Group<lone::P>;
template class fastcoll::PointToPoint<lone::P>;
template void fastcoll::run(Call<lone::P>&, Host&, double);
template void fastcoll::run(Group<lone::P>&, const Plan&, const void*, void*, Host&, double,
                            const Program*);
