/* SPDX-License-Identifier: Apache-2.0 */
/* Binds the functions of the dynamic loader (dlopen, dlsym, …) in their oldest symbol versions. Otherwise a build with
 * glibc 2.34 or later would require that version, and the probe must run in images of any age. */
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

/* A list of driver functions has a row F(field, symbol, (parameters)) for each. These macros declare the fields of
 * `call` and look up the functions. A field is NULL if this driver does not have the function. */
#define FIELD(field, symbol, parameters) CUresult(*field) parameters;
#define LOOK_UP(field, symbol, parameters) *(void **)&call.field = dlsym(cuda_handle(), #symbol);

#endif
