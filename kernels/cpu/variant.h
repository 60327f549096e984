// Every kernel file but threads.cpp and machine.cpp is compiled once for each instruction set, with TK_VARIANT naming it (setup.py).
//
//   TK_KERNEL(name)(arguments)   opens a function of the C interface: name_avx512, name_avx2, name_portable
//   namespace tk::TK_VARIANT     must hold everything else, and nothing may come from the standard library's templates: the linker
//                                keeps one copy of an inline function, and it may be the one that this machine cannot run
#pragma once
#include <cstddef>
#include <cstdint>

#define TK_JOIN_(a, b) a##_##b
#define TK_JOIN(a, b) TK_JOIN_(a, b)
#define TK_API extern "C" __attribute__((visibility("default")))
#define TK_KERNEL(name) TK_API void TK_JOIN(name, TK_VARIANT)
