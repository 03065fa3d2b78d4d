// SPDX-License-Identifier: Apache-2.0
#include "python/call_site.h"

#include <Python.h>

#include <algorithm>
#include <utility>

namespace fastcoll {

namespace {

thread_local std::string site_of_thread;
std::vector<std::string> hidden_folders;  // guarded by the GIL

bool is_hidden(const std::string& file) {
  return std::any_of(hidden_folders.begin(), hidden_folders.end(),
                     [&](const std::string& folder) { return file.starts_with(folder); });
}

}  // namespace

const std::string& call_site() { return site_of_thread; }

std::string set_call_site(std::string site) {
  return std::exchange(site_of_thread, std::move(site));
}

void hide_folders(std::vector<std::string> folders) { hidden_folders = std::move(folders); }

std::string find_call_site() {
  if (!site_of_thread.empty()) return site_of_thread;
  std::string found;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* function = PyUnicode_AsUTF8(code->co_qualname);
    const bool is_named = file && function;
    const bool is_program = is_named && !is_hidden(file);
    // A library's thread may have no other frame: then the innermost tells most.
    if (is_program || (is_named && found.empty()))
      found = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
              function;
    Py_DECREF(code);
    PyFrameObject* back = is_program ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyErr_Clear();  // of names that are no UTF-8
  return found;
}

bool CallSiteScope::note_site() {
  if (!call_site().empty()) return false;
  set_call_site(find_call_site());
  return true;
}

void CallSiteScope::forget_site() { set_call_site({}); }

}  // namespace fastcoll
