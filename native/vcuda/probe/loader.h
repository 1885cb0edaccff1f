/* SPDX-License-Identifier: Apache-2.0 */
/* Binds the loader's functions in their oldest symbol versions. Otherwise a build with glibc 2.34 or later would
 * require that version. */
#ifndef LOADER_H
#define LOADER_H

#include <dlfcn.h>

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#define OLDEST_DLINFO "GLIBC_2.3.3"
#define OLDEST_DLMOPEN "GLIBC_2.3.4"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#define OLDEST_DLINFO "GLIBC_2.17"
#define OLDEST_DLMOPEN "GLIBC_2.17"
#endif
__asm__(".symver dlopen, dlopen@" OLDEST);
__asm__(".symver dlsym, dlsym@" OLDEST);
__asm__(".symver dlvsym, dlvsym@" OLDEST);
__asm__(".symver dlerror, dlerror@" OLDEST);
__asm__(".symver dlinfo, dlinfo@" OLDEST_DLINFO);
__asm__(".symver dlmopen, dlmopen@" OLDEST_DLMOPEN);

/* For a list of F(field, symbol, (parameters)): declares the fields of `call` and their look-up. NULL: this driver
 * does not have the function. */
#define FIELD(field, symbol, parameters) CUresult(*field) parameters;
#define LOOK_UP(field, symbol, parameters) *(void **)&call.field = dlsym(cuda_handle(), #symbol);

#endif
