// SPDX-License-Identifier: Apache-2.0
// The place where a program makes a call, as text for errors: "train.py:12 in step". Looked up in
// the calling thread, for groups that trace (FASTCOLL_DEBUG=trace). The thread that carries the
// call out gets it from there.
#pragma once

#include <string>
#include <vector>

namespace fastcoll {

// The site of the call that this thread carries out; empty if none was noted.
const std::string& call_site();
std::string set_call_site(std::string site);  // returns the one before

// The innermost Python frame outside of the hidden folders; within a noted call, that one's site.
// Takes the GIL to be held.
std::string find_call_site();
// Files below these belong to libraries, not to the program.
void hide_folders(std::vector<std::string> folders);

// Notes the site of a call that runs in the thread that makes it.
class CallSiteScope {
 public:
  explicit CallSiteScope(bool is_wanted) : is_noted_(is_wanted && note_site()) {}
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;
  ~CallSiteScope() {
    if (is_noted_) [[unlikely]]
      forget_site();
  }

 private:
  // Not inlined into each verb's fast path, which seldom needs them.
  static bool note_site();  // false within a noted call
  static void forget_site();

  const bool is_noted_;
};

}  // namespace fastcoll
