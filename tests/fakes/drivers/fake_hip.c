#define API(name) hip##name
#include "fake_cudalike.h"
