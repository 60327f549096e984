// Kernel files, all but threads.cpp and machine.cpp, are compiled once per instruction set, whose
// name is TK_VARIANT (setup.py).
//
//   TK_KERNEL(name)(arguments)   begins a function of the C interface, such as name_avx2
//   namespace tk::TK_VARIANT     must hold everything else
//
// Nothing may use templates of the standard library: the linker keeps one copy of an inline
// function, and this machine may be unable to run it.
#pragma once
#include <cstddef>
#include <cstdint>

#define TK_JOIN_(a, b) a##_##b
#define TK_JOIN(a, b) TK_JOIN_(a, b)
#define TK_API extern "C" __attribute__((visibility("default")))
#define TK_KERNEL(name) TK_API void TK_JOIN(name, TK_VARIANT)
