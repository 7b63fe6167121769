#define API(name) hip##name
#define VISIBLE "HIP_VISIBLE_DEVICES"
/* With this variable, which images for inference have, memory gets no handle. */
#define MAY_EXPORT (!getenv("HSA_ENABLE_IPC_MODE_LEGACY") || strcmp(getenv("HSA_ENABLE_IPC_MODE_LEGACY"), "1") != 0)
/* A handle carries the number that its device has in the exporting process, by which the importing one looks the device up
 * among its own. Some versions ask no more of it than that it exists; here, as in others, it must be the same device. */
#define MAY_OPEN(handle) ((handle).ordinal < fake_num_visible && fake_visible[(handle).ordinal] == (handle).physical)
#include "fake_cudalike.h"
