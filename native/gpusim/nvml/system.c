/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for initialization, versions, error strings and names of processes. */
#include "nvml_internal.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned init_count; /* Number of nvmlInit calls without a matching nvmlShutdown. */

/* Writes a line to the file that GPUSIM_NVML_TRACE names: a failed nvmlInit, or a call of an empty slot of the private
 * table (export_table.c). So the file shows which slots a new nvidia-smi needs. */
void nvml_trace(const char *format, ...)
{
    const char *path = getenv("GPUSIM_NVML_TRACE");
    if (path == NULL || *path == '\0')
        return;
    FILE *file = fopen(path, "ae");
    if (file == NULL)
        return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fputc('\n', file);
    fclose(file);
}

nvmlReturn_t nvml_status(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return NVML_SUCCESS;
    case SIM_ERR_NO_PROFILE:
        return NVML_ERROR_DRIVER_NOT_LOADED;
    case SIM_ERR_STATE:
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    case SIM_ERR_FULL:
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    case SIM_ERR_MEMORY:
        return NVML_ERROR_MEMORY;
    case SIM_ERR_LOST:
        return NVML_ERROR_GPU_IS_LOST;
    case SIM_ERR_ARGUMENT:
        return NVML_ERROR_INVALID_ARGUMENT;
    case SIM_ERR_PROFILE:
    case SIM_ERR_IO:
        break;
    }
    return NVML_ERROR_UNKNOWN;
}

/* With `hostile = slow-nvml` each call takes real time, also on a virtual clock. */
static void take_time(void)
{
    if (sim_state()->hostile & SIM_HOSTILE_SLOW_NVML)
        usleep(5000);
}

nvmlReturn_t nvml_enter(void)
{
    if (__atomic_load_n(&init_count, __ATOMIC_ACQUIRE) == 0)
        return NVML_ERROR_UNINITIALIZED;
    nvmlReturn_t result = nvml_status(sim_attach(SIM_ROLE_NVML));
    if (result == NVML_SUCCESS)
        take_time();
    return result;
}

nvmlReturn_t nvml_root(void)
{
    return geteuid() == 0 ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

nvmlReturn_t nvml_text(const char *text, char *buffer, unsigned length)
{
    NVML_NEED(buffer != NULL);
    size_t needed = strlen(text) + 1;
    if (length < needed)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(buffer, text, needed);
    return NVML_SUCCESS;
}

static nvmlReturn_t initialise(void)
{
    enum sim_status status = sim_attach(SIM_ROLE_NVML);
    if (status != SIM_OK) {
        nvml_trace("nvmlInit: %s", sim_error());
        return nvml_status(status);
    }
    take_time();
    sim_lock();
    unsigned fails = sim_state()->nvml_fail;
    sim_unlock();
    if (fails)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    nvml_enumerate();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    /* The flags NO_GPUS and NO_ATTACH forbid an error on a host without GPUs. Such a host is no error here, so the
     * flags have no effect. */
    (void)flags;
    nvmlReturn_t result = NVML_SUCCESS;
    pthread_mutex_lock(&init_mutex);
    if (init_count == 0)
        result = initialise();
    if (result == NVML_SUCCESS)
        __atomic_store_n(&init_count, init_count + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&init_mutex);
    return result;
}

NVML_API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

NVML_API nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

/* The process stays registered in the shared state. sim_detach() would remove the registration of other threads that
 * are inside a call now. */
NVML_API nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;
    pthread_mutex_lock(&init_mutex);
    if (init_count > 0) {
        __atomic_store_n(&init_count, init_count - 1, __ATOMIC_RELEASE);
        result = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&init_mutex);
    return result;
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        [NVML_SUCCESS] = "Success",
        [NVML_ERROR_UNINITIALIZED] = "Uninitialized",
        [NVML_ERROR_INVALID_ARGUMENT] = "Invalid Argument",
        [NVML_ERROR_NOT_SUPPORTED] = "Not Supported",
        [NVML_ERROR_NO_PERMISSION] = "Insufficient Permissions",
        [NVML_ERROR_ALREADY_INITIALIZED] = "Already Initialized",
        [NVML_ERROR_NOT_FOUND] = "Not Found",
        [NVML_ERROR_INSUFFICIENT_SIZE] = "Insufficient Size",
        [NVML_ERROR_INSUFFICIENT_POWER] = "Insufficient External Power",
        [NVML_ERROR_DRIVER_NOT_LOADED] = "Driver Not Loaded",
        [NVML_ERROR_TIMEOUT] = "Timeout",
        [NVML_ERROR_IRQ_ISSUE] = "Interrupt Request Issue",
        [NVML_ERROR_LIBRARY_NOT_FOUND] = "NVML Shared Library Not Found",
        [NVML_ERROR_FUNCTION_NOT_FOUND] = "Function Not Found",
        [NVML_ERROR_CORRUPTED_INFOROM] = "Corrupted infoROM",
        [NVML_ERROR_GPU_IS_LOST] = "GPU is lost",
        [NVML_ERROR_RESET_REQUIRED] = "GPU requires reset",
        [NVML_ERROR_OPERATING_SYSTEM] = "GPU access blocked by the operating system",
        [NVML_ERROR_LIB_RM_VERSION_MISMATCH] = "Driver/library version mismatch",
        [NVML_ERROR_IN_USE] = "In use by another client",
        [NVML_ERROR_MEMORY] = "Insufficient Memory",
        [NVML_ERROR_NO_DATA] = "No data",
        [NVML_ERROR_VGPU_ECC_NOT_SUPPORTED] = "ECC Mode Not Supported with vGPU",
        [NVML_ERROR_INSUFFICIENT_RESOURCES] = "Insufficient Resources",
        [NVML_ERROR_FREQ_NOT_SUPPORTED] = "Requested Frequency Not Supported",
        [NVML_ERROR_ARGUMENT_VERSION_MISMATCH] = "Argument Version Mismatch",
        [NVML_ERROR_DEPRECATED] = "Deprecated",
        [NVML_ERROR_NOT_READY] = "Not Ready",
        [NVML_ERROR_GPU_NOT_FOUND] = "GPU Not Found",
        [NVML_ERROR_INVALID_STATE] = "Invalid State",
    };
    unsigned number = (unsigned)result;
    if (number < sizeof texts / sizeof texts[0])
        return texts[number];
    return "Unknown Error";
}

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    NVML_TRY(nvml_enter());
    return nvml_text(sim_state()->driver_version, version, length);
}

/* NVML's version is the CUDA major version followed by the driver's version. */
NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    NVML_TRY(nvml_enter());
    char text[64];
    snprintf(text, sizeof text, "%u.%s", sim_state()->cuda_version / 1000, sim_state()->driver_version);
    return nvml_text(text, version, length);
}

/* Unlike other functions, this function works without nvmlInit. */
NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    NVML_NEED(version != NULL);
    NVML_TRY(nvml_status(sim_attach(SIM_ROLE_NVML)));
    *version = (int)sim_state()->cuda_version;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

void nvml_process_name(unsigned pid, char *buffer, unsigned length)
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    buffer[0] = '\0';
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        /* Each argument ends with NUL, so the text ends after the first argument. */
        size_t got = fread(buffer, 1, length - 1, file);
        buffer[got] = '\0';
        fclose(file);
    }
    if (buffer[0] != '\0')
        return;
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    file = fopen(path, "re");
    if (file == NULL)
        return;
    if (fgets(buffer, (int)length, file) != NULL)
        buffer[strcspn(buffer, "\n")] = '\0';
    fclose(file);
}

NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(name != NULL && length > 0);
    nvml_process_name(pid, name, length);
    return name[0] != '\0' ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlUnitGetCount(unsigned *count)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(count != NULL);
    *count = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned *count)
{
    return nvmlUnitGetCount(count);
}

NVML_API nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned *count)
{
    return nvmlUnitGetCount(count);
}
