/* SPDX-License-Identifier: Apache-2.0 */
/* Tells systemd that the arbiter is ready and alive, by the notify protocol: each message is a datagram to the socket
 * that NOTIFY_SOCKET names. */
#include "tenants.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void notify(const char *state)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || strlen(path) >= sizeof address.sun_path || (path[0] != '/' && path[0] != '@'))
        return;
    memcpy(address.sun_path, path, strlen(path));
    if (path[0] == '@')
        address.sun_path[0] = 0;
    int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (descriptor < 0)
        return;
    sendto(descriptor, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&address,
           (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path)));
    close(descriptor);
}

uint64_t notify_interval(void)
{
    const char *text = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    if (!text || (pid && atol(pid) != (long)getpid()))
        return 0;
    return strtoull(text, NULL, 10) * 1000 / 3;
}
