/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the MIG profiles of the GPU models. The rows of models.c name them with the macro SIM_MIG(). */
#ifndef GPUSIM_MODELS_MIG_H
#define GPUSIM_MODELS_MIG_H

#include "models.h"

#define SIM_MIG_PROFILES 7
#define SIM_MIG(table) .mig = (table), .mig_count = SIM_MIG_PROFILES

extern const struct sim_mig_profile sim_mig_a100_40[SIM_MIG_PROFILES];
extern const struct sim_mig_profile sim_mig_a100_80[SIM_MIG_PROFILES];
extern const struct sim_mig_profile sim_mig_h100_80[SIM_MIG_PROFILES];
extern const struct sim_mig_profile sim_mig_h200[SIM_MIG_PROFILES];

#endif
