/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces NVIDIA's libnvidia-container.so.1 on the simulated hosts. It only returns its version, because programs
 * query the version first. */

struct nvc_version {
    unsigned int major;
    unsigned int minor;
    unsigned int patch;
    const char *string;
};

const struct nvc_version *nvc_version(void);

const struct nvc_version *nvc_version(void)
{
    static const struct nvc_version version = {NVC_MAJOR, NVC_MINOR, NVC_PATCH, NVC_STRING};

    return &version;
}
