/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the environment variables of this process. A parser returns false for a value that it does not understand
 * completely, and the variable then counts as not set. */
#include "env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

bool env_bytes(const char *text, uint64_t *bytes)
{
    uint64_t value = 0;
    const char *c = text;
    if (*c < '0' || *c > '9')
        return false;
    for (; *c >= '0' && *c <= '9'; c++) {
        if (value > (UINT64_MAX - 9) / 10)
            return false;
        value = value * 10 + (uint64_t)(*c - '0');
    }
    unsigned shift = 0;
    switch (*c) {
    case 'k': case 'K': shift = 10; c++; break;
    case 'm': case 'M': shift = 20; c++; break;
    case 'g': case 'G': shift = 30; c++; break;
    default: break;
    }
    /* Refuse 0, because it could mean "no limit" or "nothing". */
    if (*c || value == 0 || value > UINT64_MAX >> shift)
        return false;
    *bytes = value << shift;
    return true;
}

bool env_flag(const char *text, bool *value)
{
    static const char *const yes[] = {"true", "1", "yes", "on"}, *const no[] = {"false", "0", "no", "off", ""};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strcasecmp(text, yes[i]) == 0) {
            *value = true;
            return true;
        }
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (strcasecmp(text, no[i]) == 0) {
            *value = false;
            return true;
        }
    return false;
}

bool env_number(const char *text, int low, int high, int *value)
{
    int number = 0;
    if (!*text)
        return false;
    for (const char *c = text; *c; c++) {
        if (*c < '0' || *c > '9' || number > high)
            return false;
        number = number * 10 + (*c - '0');
    }
    if (number < low || number > high)
        return false;
    *value = number;
    return true;
}

static bool env_policy(const char *text, int *policy)
{
    static const char *const names[] = {
        [VGPU_CORE_DEFAULT] = "default", [VGPU_CORE_FORCE] = "force", [VGPU_CORE_DISABLE] = "disable"};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcasecmp(text, names[i]) == 0) {
            *policy = i;
            return true;
        }
    return false;
}

void env_keep_path(const char *text, char *kept, size_t room)
{
    size_t length = 0;
    if (text[0] && text[0] != '/' && getcwd(kept, room - 1)) {
        length = strlen(kept);
        kept[length++] = '/';
    }
    /* A truncated path fills the buffer, so ledger.c refuses the path as too long. */
    snprintf(kept + length, room - length, "%s", text);
}

/* --- reading one variable ------------------------------------------------------------------------------- */

static void ignored(const char *name, const char *text, const char *expected)
{
    vgpu_log_line(LOG_ERROR, "%s='%.64s' is ignored: expected %s", name, text, expected);
}

static void read_bytes(const char *name, uint64_t *bytes)
{
    const char *text = getenv(name);
    if (text && !env_bytes(text, bytes))
        ignored(name, text, "a whole number above 0, with or without k, m or g");
}

static void read_number(const char *name, int low, int high, int *number)
{
    char expected[48];
    const char *text = getenv(name);
    if (!text || env_number(text, low, high, number))
        return;
    snprintf(expected, sizeof expected, "a whole number from %d to %d", low, high);
    ignored(name, text, expected);
}

static void read_flag(const char *name, int *flag)
{
    bool value;
    const char *text = getenv(name);
    if (text && env_flag(text, &value))
        *flag = value;
    else if (text)
        ignored(name, text, "true or false");
}

void env_read(struct environment *environment)
{
    char name[48];
    int disable = ENV_UNSET;
    memset(environment, 0, sizeof *environment);
    environment->sm = environment->policy = environment->priority = environment->log_level = ENV_UNSET;
    environment->oom_killer = environment->oversubscribe = ENV_UNSET;
    read_bytes("CUDA_DEVICE_MEMORY_LIMIT", &environment->memory);
    read_number("CUDA_DEVICE_SM_LIMIT", 0, 100, &environment->sm);
    environment->limits = environment->memory || environment->sm > 0;
    for (int i = 0; i < VGPU_MAX_DEVICES; i++) {
        snprintf(name, sizeof name, "CUDA_DEVICE_MEMORY_LIMIT_%d", i);
        read_bytes(name, &environment->memory_of[i]);
        snprintf(name, sizeof name, "CUDA_DEVICE_SM_LIMIT_%d", i);
        environment->sm_of[i] = ENV_UNSET;
        read_number(name, 0, 100, &environment->sm_of[i]);
        environment->limits = environment->limits || environment->memory_of[i] || environment->sm_of[i] > 0;
        environment->by_device = environment->by_device || environment->memory_of[i] || environment->sm_of[i] >= 0;
    }
    const char *text = getenv("GPU_CORE_UTILIZATION_POLICY");
    if (text && !env_policy(text, &environment->policy))
        ignored("GPU_CORE_UTILIZATION_POLICY", text, "default, force or disable");
    read_number("CUDA_TASK_PRIORITY", 0, 1, &environment->priority);
    read_flag("ACTIVE_OOM_KILLER", &environment->oom_killer);
    read_flag("CUDA_OVERSUBSCRIBE", &environment->oversubscribe);
    environment->limits = environment->limits || environment->oversubscribe == true;
    read_flag("CUDA_DISABLE_CONTROL", &disable);
    environment->disable = disable == true;
    read_number("LIBCUDA_LOG_LEVEL", 0, 5, &environment->log_level);
    text = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    if (text)
        env_keep_path(text, environment->ledger, sizeof environment->ledger);
}
