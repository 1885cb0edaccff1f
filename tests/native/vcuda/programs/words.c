/* SPDX-License-Identifier: Apache-2.0 */
/* More commands of the puppet program (puppet.c), which makes driver calls for tests and keeps handles in numbered
 * registers. These commands are for graphs, graph memory, code, heaps, and memory bound to other objects. Each function
 * prints the result line and returns 1, or returns 0 if it does not know the command. */
#include "words.h"

#include "rows.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CALL(function, ...) (cu->function ? cu->function(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* The driver calls this function of libGL to find the current OpenGL context. */
static bool gl_context;
void *glXGetCurrentContext(void);
void *glXGetCurrentContext(void)
{
    return gl_context ? &gl_context : NULL;
}

/* CUgraphNodeParams: the node type, reserved words, then the parameters of this type. */
struct node_parameters {
    int type, reserved[3];
    union {
        CUDA_MEM_ALLOC_NODE_PARAMS memory;
        long long room[29];
    } as;
    long long reserved2;
};
_Static_assert(sizeof(struct node_parameters) == 256, "CUgraphNodeParams");

static CUDA_MEM_ALLOC_NODE_PARAMS memory_of(size_t bytes, int device)
{
    return (CUDA_MEM_ALLOC_NODE_PARAMS){
        .poolProps = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}}, .bytesize = bytes};
}

/* Adds an allocation node. Writes the address to register `to` and the node to register `to` + 1. */
static CUresult add_memory(const struct api *cu, unsigned long long *reg, int to, CUgraph graph, size_t bytes, int device,
                           int general)
{
    CUgraphNode node;
    CUresult status;
    CUdeviceptr pointer;
    if (general) {
        struct node_parameters parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .as.memory = memory_of(bytes, device)};
        status = CALL(cuGraphAddNode, &node, graph, NULL, 0, &parameters);
        pointer = parameters.as.memory.dptr;
    } else {
        CUDA_MEM_ALLOC_NODE_PARAMS parameters = memory_of(bytes, device);
        status = CALL(cuGraphAddMemAllocNode, &node, graph, NULL, 0, &parameters);
        pointer = parameters.dptr;
    }
    if (status == CUDA_SUCCESS) {
        reg[to] = pointer;
        reg[to + 1] = (unsigned long long)node;
    }
    return status;
}

/* Captures an allocation. Writes the graph to register `to` and the address to register `to` + 1. */
static CUresult capture(const struct api *cu, unsigned long long *reg, int to, size_t bytes, int freed, int per_thread)
{
    CUstream stream;
    CUdeviceptr pointer = 0;
    CUgraph graph = NULL;
    CUresult status = CALL(cuStreamCreate, &stream, 1);
    if (status == CUDA_SUCCESS)
        status = CALL(cuStreamBeginCapture_v2, stream, 2);
    if (status != CUDA_SUCCESS)
        return status;
    status = per_thread ? CALL(cuMemAllocAsync_ptsz, &pointer, bytes, stream) : CALL(cuMemAllocAsync, &pointer, bytes, stream);
    if (status == CUDA_SUCCESS && freed)
        status = CALL(cuMemFreeAsync, pointer, stream);
    CUresult ended = CALL(cuStreamEndCapture, stream, &graph);
    reg[to] = (unsigned long long)graph;
    reg[to + 1] = pointer;
    return status != CUDA_SUCCESS ? status : ended;
}

/* Captures the launch of a graph into `graph`: the launched graph becomes a child graph of `graph`. */
static CUresult capture_launch(const struct api *cu, CUgraph *graph, CUgraphExec exec)
{
    CUstream stream;
    CUresult status = CALL(cuStreamCreate, &stream, 1);
    if (status == CUDA_SUCCESS)
        status = CALL(cuStreamBeginCapture_v2, stream, 2);
    if (status == CUDA_SUCCESS)
        status = CALL(cuGraphLaunch, exec, stream);
    return status == CUDA_SUCCESS ? CALL(cuStreamEndCapture, stream, graph) : status;
}

static CUresult instantiate(const struct api *cu, CUgraphExec *exec, CUgraph graph, int form)
{
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters = {0};
    switch (form) {
    case 0: return CALL(cuGraphInstantiateWithFlags, exec, graph, 0);
    case 1: return CALL(cuGraphInstantiate, exec, graph, NULL, NULL, 0);
    case 2: return CALL(cuGraphInstantiate_v2, exec, graph, NULL, NULL, 0);
    case 3: return CALL(cuGraphInstantiateWithParams, exec, graph, &parameters);
    default: return CALL(cuGraphInstantiateWithParams_ptsz, exec, graph, &parameters);
    }
}

int graph_word(const struct api *cu, unsigned long long *reg, const char *verb, unsigned long long a, unsigned long long b,
               unsigned long long c, unsigned long long d)
{
    CUresult status;
    CUgraphNode node;
    if (strcmp(verb, "graph") == 0)
        status = CALL(cuGraphCreate, (CUgraph *)&reg[a], 0);
    else if (strcmp(verb, "graph-alloc") == 0 || strcmp(verb, "graph-add") == 0)
        status = add_memory(cu, reg, (int)a, (CUgraph)reg[b], c, (int)d, strcmp(verb, "graph-add") == 0);
    else if (strcmp(verb, "graph-free") == 0) {
        CUgraphNode after = (CUgraphNode)reg[b + 1];
        status = CALL(cuGraphAddMemFreeNode, &node, (CUgraph)reg[a], &after, 1, reg[b]);
    } else if (strcmp(verb, "graph-child") == 0)
        status = CALL(cuGraphAddChildGraphNode, &node, (CUgraph)reg[a], NULL, 0, (CUgraph)reg[b]);
    else if (strcmp(verb, "capture") == 0)
        status = capture(cu, reg, (int)a, b, (int)c, (int)d);
    else if (strcmp(verb, "capture-launch") == 0)
        status = capture_launch(cu, (CUgraph *)&reg[a], (CUgraphExec)reg[b]);
    else if (strcmp(verb, "instantiate") == 0)
        status = instantiate(cu, (CUgraphExec *)&reg[a], (CUgraph)reg[b], (int)c);
    else if (strcmp(verb, "upload") == 0)
        status = b ? CALL(cuGraphUpload_ptsz, (CUgraphExec)reg[a], NULL) : CALL(cuGraphUpload, (CUgraphExec)reg[a], NULL);
    else if (strcmp(verb, "launch-graph") == 0)
        status = b ? CALL(cuGraphLaunch_ptsz, (CUgraphExec)reg[a], NULL) : CALL(cuGraphLaunch, (CUgraphExec)reg[a], NULL);
    else if (strcmp(verb, "exec-destroy") == 0)
        status = CALL(cuGraphExecDestroy, (CUgraphExec)reg[a]);
    else if (strcmp(verb, "graph-destroy") == 0)
        status = CALL(cuGraphDestroy, (CUgraph)reg[a]);
    else if (strcmp(verb, "trim") == 0)
        status = CALL(cuDeviceGraphMemTrim, (int)a);
    else
        return 0;
    printf("%d\n", status);
    return 1;
}

/* Returns a code image that takes `bytes` of GPU memory. The lines with .gpusim tell the simulated driver its kernels,
 * with their times in us, and its variables. The buffer is static, because a loaded CUDA library keeps a pointer to the
 * text. */
static const char *image(unsigned long long bytes)
{
    static char text[352];
    snprintf(text, sizeof text,
             ".version 7.0\n.target sm_50\n.address_size 64\n// .gpusim kernel k 1\n// .gpusim kernel other 1\n// .gpusim kernel forever inf\n"
             "// .gpusim global g 4096\n// .gpusim managed m 4096\n// .gpusim bytes %llu\n",
             bytes);
    return text;
}

/* Writes the text to a new temporary file and its name to `path`. The caller unlinks the file. */
static bool to_file(char *path, const char *text)
{
    strcpy(path, "/tmp/vgpu-image-XXXXXX");
    int descriptor = mkstemp(path);
    if (descriptor < 0 || write(descriptor, text, strlen(text)) != (ssize_t)strlen(text))
        return false;
    close(descriptor);
    return true;
}

static CUresult from_file(const struct api *cu, CUlibrary *library, const char *text)
{
    char path[32];
    if (!to_file(path, text))
        return -2;
    CUresult status = CALL(cuLibraryLoadFromFile, library, path, NULL, NULL, 0, NULL, NULL, 0);
    unlink(path);
    return status;
}

int code_word(const struct api *cu, unsigned long long *reg, const char *verb, unsigned long long a, unsigned long long b,
              unsigned long long c)
{
    CUresult status;
    size_t size = 0;
    CUdeviceptr pointer;
    if (strcmp(verb, "library") == 0)
        status = CALL(cuLibraryLoadData, (CUlibrary *)&reg[a], image(b), NULL, NULL, 0, NULL, NULL, 0);
    else if (strcmp(verb, "library-file") == 0)
        status = from_file(cu, (CUlibrary *)&reg[a], image(b));
    else if (strcmp(verb, "library-unload") == 0)
        status = CALL(cuLibraryUnload, (CUlibrary)reg[a]);
    else if (strcmp(verb, "library-module") == 0)
        status = CALL(cuLibraryGetModule, (CUmodule *)&reg[a], (CUlibrary)reg[b]);
    else if (strcmp(verb, "library-global") == 0)
        status = CALL(cuLibraryGetGlobal, &pointer, &size, (CUlibrary)reg[a], "g");
    else if (strcmp(verb, "kernel") == 0)
        status = CALL(cuLibraryGetKernel, (CUkernel *)&reg[a], (CUlibrary)reg[b], c == 2 ? "absent" : c ? "other" : "k");
    else if (strcmp(verb, "kernel-function") == 0)
        status = CALL(cuKernelGetFunction, (CUfunction *)&reg[a], (CUkernel)reg[b]);
    else if (strcmp(verb, "image") == 0)
        status = CALL(cuModuleLoadData, (CUmodule *)&reg[a], image(b));
    else if (strcmp(verb, "function") == 0)
        status = CALL(cuModuleGetFunction, (CUfunction *)&reg[a], (CUmodule)reg[b], c ? "other" : "k");
    else if (strcmp(verb, "global") == 0)
        status = CALL(cuModuleGetGlobal_v2, &pointer, &size, (CUmodule)reg[a], "g");
    else if (strcmp(verb, "launch") == 0)
        status = CALL(cuLaunchKernel, (CUfunction)reg[a], 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    else if (strcmp(verb, "set-limit") == 0)
        status = CALL(cuCtxSetLimit, (int)a, b);
    else if (strcmp(verb, "get-limit") == 0) {
        status = CALL(cuCtxGetLimit, &size, (int)a);
        printf("%d %zu\n", status, size);
        return 1;
    } else
        return 0;
    printf("%d\n", status);
    return 1;
}

struct multicast_properties {
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};

int bind_word(const struct api *cu, unsigned long long *reg, const char *verb, unsigned long long a, unsigned long long b,
              unsigned long long c, unsigned long long d)
{
    CUresult status;
    if (strcmp(verb, "sparse") == 0) {
        CUDA_ARRAY3D_DESCRIPTOR array = {b, c, 0, 0x20, 1, CUDA_ARRAY3D_SPARSE};
        status = CALL(cuArray3DCreate_v2, (CUarray *)&reg[a], &array);
    } else if (strcmp(verb, "tile") == 0) {
        CUarrayMapInfo tile = {.resource = (void *)reg[a], .memOperationType = (int)c, .memHandle.memHandle = reg[b]};
        tile.deviceBitMask = 1;
        status = d ? CALL(cuMemMapArrayAsync_ptsz, &tile, 1, NULL) : CALL(cuMemMapArrayAsync, &tile, 1, NULL);
    } else if (strcmp(verb, "multicast") == 0) {
        struct multicast_properties properties = {.devices = (unsigned)c, .bytes = b};
        status = CALL(cuMulticastCreate, &reg[a], &properties);
    } else if (strcmp(verb, "multicast-add") == 0)
        status = CALL(cuMulticastAddDevice, reg[a], (int)b);
    else if (strcmp(verb, "multicast-bind") == 0)
        status = CALL(cuMulticastBindMem, reg[a], 0, reg[b], 0, c, 0);
    else if (strcmp(verb, "multicast-bind-address") == 0)
        status = CALL(cuMulticastBindAddr, reg[a], 0, reg[b], c, 0);
    else if (strcmp(verb, "multicast-unbind") == 0)
        status = CALL(cuMulticastUnbind, reg[a], 0, 0, b);
    else if (strcmp(verb, "pool-of") == 0) { /* pool-of REGISTER ALLOCATION-TYPE LOCATION-TYPE: creates a memory pool */
        CUmemPoolProps properties = {.allocType = (int)b, .location = {(int)c, 0}};
        status = CALL(cuMemPoolCreate, (CUmemoryPool *)&reg[a], &properties);
    } else if (strcmp(verb, "frompool-nothing") == 0) {
        static char nothing[4096];
        status = CALL(cuMemAllocFromPoolAsync, &reg[a], b, (CUmemoryPool)nothing, NULL);
    } else
        return 0;
    printf("%d\n", status);
    return 1;
}

/*
 * call NAME ARGUMENT...    calls any function whose arguments are integers or pointers of up to 8 bytes
 * linked NAME ARGUMENT...  calls a hooked function by its link-time symbol
 * proc NAME ARGUMENT...    calls a hooked function by the address from cuGetProcAddress
 * driver OFFSET ARGUMENT...  calls the function at this offset in libcuda.so.1. As with NVIDIA's runtime and its private
 *                          functions, the call bypasses the hooks.
 *
 * An argument has one of these forms. 7 is a number; $7 is the value of register 7; @7 is the address of register 7; 'k
 * is the string "k"; %7 is a code image of 7 bytes; #7 is the name of a file with such an image; &f is the address of
 * the libc function f. A structure of 8 bytes that is passed by value is written as one number.
 */
static int base_of_driver(struct dl_phdr_info *object, size_t size, void *base)
{
    (void)size;
    if (strstr(object->dlpi_name, "libcuda.so.1"))
        *(uintptr_t *)base = object->dlpi_addr;
    return 0;
}

static void *function_of(const char *verb, const char *name)
{
    if (verb[0] == 'd') {
        uintptr_t base = 0;
        dl_iterate_phdr(base_of_driver, &base);
        return (void *)(base + strtoull(name, NULL, 0));
    }
    return verb[0] == 'c' ? dlsym(RTLD_DEFAULT, name) : verb[0] == 'l' ? row_linked(name) : row_by_address(name);
}

int call_word(unsigned long long *reg, const char *verb, char *text)
{
    unsigned long long value[11] = {0};
    if (strcmp(verb, "put") == 0) { /* put REGISTER NUMBER or put REGISTER $REGISTER: sets the first register */
        char *end;
        unsigned long long to = strtoull(text, &end, 0);
        char *other = strchr(end, '$');
        reg[to] = other ? reg[strtoull(other + 1, NULL, 0)] : strtoull(end, NULL, 0);
        puts("0");
        return 1;
    }
    if (strcmp(verb, "close-fd") == 0) { /* close-fd REGISTER: closes the descriptor in the register */
        printf("%d\n", close((int)reg[strtoull(text, NULL, 0)]));
        return 1;
    }
    if (strcmp(verb, "take-fd") == 0) { /* take-fd REGISTER PID FD: duplicates descriptor FD of process PID */
        unsigned to;
        int pid, fd;
        if (sscanf(text, "%u %d %d", &to, &pid, &fd) != 3)
            return 0;
        int process = (int)syscall(SYS_pidfd_open, pid, 0);
        int taken = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, fd, 0);
        if (process >= 0)
            close(process);
        reg[to] = (unsigned long long)taken;
        printf("%d %d\n", taken < 0, taken);
        return 1;
    }
    if (strcmp(verb, "ipc-open") == 0) { /* ipc-open REGISTER WORD...: opens the IPC handle that the eight words form */
        CUipcMemHandle handle;
        char *end;
        unsigned long long to = strtoull(text, &end, 0);
        for (int i = 0; i < 8; i++)
            value[i] = strtoull(end, &end, 0);
        memcpy(&handle, value, sizeof handle);
        int (*open)(CUdeviceptr *, CUipcMemHandle, unsigned);
        *(void **)&open = dlsym(RTLD_DEFAULT, "cuIpcOpenMemHandle_v2");
        printf("%d\n", open(&reg[to], handle, 1));
        return 1;
    }
    if (strcmp(verb, "gl") == 0) { /* gl: from now on glXGetCurrentContext returns a context */
        gl_context = true;
        puts("0");
        return 1;
    }
    if (strcmp(verb, "show") == 0) { /* show REGISTER COUNT: prints COUNT registers from REGISTER on */
        char *end;
        unsigned long long from = strtoull(text, &end, 0), count = strtoull(end, NULL, 0);
        printf("0");
        for (unsigned long long i = 0; i < count; i++)
            printf(" %llu", reg[from + i]);
        puts("");
        return 1;
    }
    bool calls = strcmp(verb, "call") == 0 || strcmp(verb, "linked") == 0 || strcmp(verb, "proc") == 0 ||
                 strcmp(verb, "driver") == 0;
    char path[32] = "", *word, *rest = NULL, *name = calls ? strtok_r(text, " \n", &rest) : NULL;
    if (!name)
        return 0;
    for (int i = 0; i < 11 && (word = strtok_r(NULL, " \n", &rest)); i++) {
        unsigned long long number = strtoull(word + (strchr("$@%#", *word) != NULL), NULL, 0);
        value[i] = *word == '$' ? reg[number] : *word == '@' ? (unsigned long long)&reg[number] : number;
        if (*word == '\'')
            value[i] = (unsigned long long)(word + 1);
        else if (*word == '&')
            value[i] = (unsigned long long)dlsym(RTLD_DEFAULT, word + 1);
        else if (*word == '%')
            value[i] = (unsigned long long)image(number);
        else if (*word == '#' && to_file(path, image(number)))
            value[i] = (unsigned long long)path;
    }
    typedef unsigned long long one;
    /* Every call passes eleven arguments, as many as cuLaunchKernel has, so that no function reads an argument that was
     * not set. */
    int (*function)(one, one, one, one, one, one, one, one, one, one, one);
    *(void **)&function = function_of(verb, name);
    printf("%d\n", function ? function(value[0], value[1], value[2], value[3], value[4], value[5], value[6], value[7],
                                       value[8], value[9], value[10])
                            : -2);
    if (*path)
        unlink(path);
    return 1;
}
