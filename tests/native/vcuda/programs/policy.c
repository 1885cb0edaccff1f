/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the limits and settings that the library applies in this process. For each input line it prints one line: the
 * control state, policy, priority, OOM killer, oversubscription, log level, and the SM limit in percent of each GPU
 * that the arguments name. */
#include "limits/limits.h"

#include <stdio.h>

int main(int argc, char **argv)
{
    char line[16];
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        printf("%d", (int)limits_control());
        printf(" %d %d %d %d %d", (int)limits_core_policy(), limits_priority(), limits_oom_killer(), limits_oversubscribe(),
               (int)atomic_load(&vgpu_log_level));
        for (int i = 1; i < argc; i++)
            printf(" %u", limits_sm_percent(argv[i], i - 1));
        puts("");
    }
    return 0;
}
