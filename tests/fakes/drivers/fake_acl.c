/* libascendcl: other names, other argument orders, keys as text of 65 bytes. */
#include "fake_collectives.h"

#define KEY_BYTES 65
static const int codes[] = {0, 107000 /* invalid parameter */, 207001 /* out of memory */, 507899 /* driver error */,
                            507899 /* driver error */, 107001 /* invalid device */, 507899, 507899, 507899, 507899};
static char message[128] = "";

static int done_with(const char *name, int code) {
  int injected = fake_injected(name);
  if (injected) code = injected;
  if (code) {
    fake_last_error = code;
    snprintf(message, sizeof message, "E%d: %s", code, code == 207001 ? "out of memory" : "call refused");
  }
  return code;
}
static int done(const char *name, int status) { return done_with(name, codes[status]); }
/* Nothing but counting devices works before aclInit and after aclFinalize, nor in a thread that has chosen no device. */
static int is_initialized;
static _Thread_local int has_device;
#define READY(name)                                                                              \
  do {                                                                                           \
    GUARD(name);                                                                                 \
    if (!is_initialized) return done_with(name, 100001 /* not initialized */);                   \
    if (!has_device) return done_with(name, 107002 /* no context */);                            \
  } while (0)
#define GUARD(name)                                                                              \
  do {                                                                                           \
    int started = fake_start("ASCEND_RT_VISIBLE_DEVICES");                                       \
    if (started != FAKE_OK || (fake_fail_times > 0 && strcmp(name, fake_fail_name) == 0))        \
      return done(name, started);                                                                \
  } while (0)

int aclrtGetDeviceCount(uint32_t *count) {
  GUARD("aclrtGetDeviceCount");
  *count = (uint32_t)fake_num_visible;
  return done("aclrtGetDeviceCount", FAKE_OK);
}
int aclInit(const char *path) {
  (void)path;
  GUARD("aclInit");
  if (is_initialized) return done_with("aclInit", 100002 /* repeated */);
  is_initialized = 1;
  return done("aclInit", FAKE_OK);
}
int aclFinalize(void) {
  is_initialized = 0;
  return done("aclFinalize", FAKE_OK);
}
/* The number of the host for a number of this process. */
int aclrtGetPhyDevIdByUserDevId(int32_t index, int32_t *physical) {
  GUARD("aclrtGetPhyDevIdByUserDevId");
  if (index < 0 || index >= fake_num_visible) return done("aclrtGetPhyDevIdByUserDevId", FAKE_NO_DEVICE);
  *physical = fake_visible[index];
  return done("aclrtGetPhyDevIdByUserDevId", FAKE_OK);
}
int aclrtSetDevice(int32_t index) {
  GUARD("aclrtSetDevice");
  if (!is_initialized) return done_with("aclrtSetDevice", 100001);
  if (index < 0 || index >= fake_num_visible) return done("aclrtSetDevice", FAKE_NO_DEVICE);
  fake_device = index;
  has_device = 1;
  return done("aclrtSetDevice", FAKE_OK);
}
int aclrtMalloc(void **pointer, size_t size, int policy) {
  READY("aclrtMalloc");
  return done("aclrtMalloc", policy == 0 ? fake_malloc(pointer, size) : FAKE_INVALID);
}
int aclrtFree(void *pointer) { GUARD("aclrtFree"); return done("aclrtFree", fake_release(pointer, 0)); }
int aclrtGetMemInfo(int attribute, size_t *available, size_t *total) {
  READY("aclrtGetMemInfo");
  *available = fake_total - fake_used;
  *total = fake_total;
  return done("aclrtGetMemInfo", attribute == 1 ? FAKE_OK : FAKE_INVALID);
}
int aclrtIpcMemGetExportKey(void *pointer, size_t size, char *key, size_t length, uint64_t flags) {
  fake_handle inner;
  fake_block *block = fake_find(pointer);
  READY("aclrtIpcMemGetExportKey");
  if (length != KEY_BYTES || flags != 1 || block == NULL || size > block->size || fake_export(pointer, &inner) != FAKE_OK)
    return done("aclrtIpcMemGetExportKey", FAKE_INVALID);
  snprintf(key, length, "%d:%d:%llu:%llu", inner.pid, inner.fd, (unsigned long long)inner.inode,
           (unsigned long long)inner.size);
  return done("aclrtIpcMemGetExportKey", FAKE_OK);
}
static int parse(const char *key, fake_handle *inner) {
  unsigned long long inode, size;
  if (sscanf(key, "%d:%d:%llu:%llu", &inner->pid, &inner->fd, &inode, &size) != 4) return FAKE_INVALID;
  inner->inode = inode, inner->size = size;
  return FAKE_OK;
}
int aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t flags) {
  fake_handle inner;
  READY("aclrtIpcMemImportByKey");
  fake_open_flags = (long)flags;
  if (parse(key, &inner) != FAKE_OK) return done("aclrtIpcMemImportByKey", FAKE_INVALID);
  return done("aclrtIpcMemImportByKey", fake_open(&inner, pointer));
}
/* Both sides close by key: an importer to unmap, then the exporter before it frees. */
int aclrtIpcMemClose(const char *key) {
  fake_handle inner;
  struct stat status;
  READY("aclrtIpcMemClose");
  if (parse(key, &inner) != FAKE_OK) return done("aclrtIpcMemClose", FAKE_INVALID);
  if (inner.pid == getpid()) {
    for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
      if (fake_blocks[i].pointer && !fake_blocks[i].imported && fake_blocks[i].fd == inner.fd &&
          fake_has_importers(&fake_blocks[i]))
        return done("aclrtIpcMemClose", FAKE_MAPPED);
    fake_unexports++;
    return done("aclrtIpcMemClose", FAKE_OK);
  }
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_blocks[i].pointer && fake_blocks[i].imported && fstat(fake_blocks[i].fd, &status) == 0 &&
        status.st_ino == inner.inode)
      return done("aclrtIpcMemClose", fake_release(fake_blocks[i].pointer, 1));
  return done("aclrtIpcMemClose", FAKE_INVALID);
}
/* Copies of host memory that is not pinned, and of addresses that are not aligned, are refused, which the real one carries
 * out wrongly. */
static int is_there(const void *pointer, size_t size, int on_device) {
  if ((uintptr_t)pointer % 64) return 0;
  return on_device ? fake_owns(pointer, size) : fake_host_of(pointer, size) != NULL;
}
int aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t size, int kind, void *stream) {
  READY("aclrtMemcpyAsync");
  (void)stream;
  int is_right = is_there(dst, size, kind & 1) && is_there(src, size, kind & 2); /* host to host is not supported */
  return done("aclrtMemcpyAsync", room >= size && kind && is_right ? fake_copy(dst, src, size, kind) : FAKE_INVALID);
}
/* Lives as long as the process. */
static int fake_malloc_host(void **pointer, size_t size) {
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++) {
    if (fake_hosts[i].pointer) continue;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return FAKE_OOM;
    fake_hosts[i] = (fake_host){mapped, size, 0};
    *pointer = mapped;
    fake_host_mallocs++;
    return FAKE_OK;
  }
  return FAKE_OOM;
}

int aclrtMallocHost(void **pointer, size_t size) {
  READY("aclrtMallocHost");
  return done("aclrtMallocHost", fake_malloc_host(pointer, size));
}
int aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flags) {
  READY("aclrtHostRegisterV2");
  return done("aclrtHostRegisterV2", flags == 0x10000000 /* pinned */ ? fake_register(pointer, size) : FAKE_INVALID);
}
int aclrtHostUnregister(void *pointer) {
  READY("aclrtHostUnregister");
  return done("aclrtHostUnregister", fake_unregister(pointer));
}
int aclrtCreateStream(void **stream) {
  READY("aclrtCreateStream");
  *stream = (void *)(intptr_t)(0x1000 + ++fake_streams_created);
  return done("aclrtCreateStream", FAKE_OK);
}
int aclrtSynchronizeStream(void *stream) {
  READY("aclrtSynchronizeStream");
  (void)stream;
  fake_stream_syncs++;
  return done("aclrtSynchronizeStream", FAKE_OK);
}
int aclrtCreateEvent(void **event) {
  READY("aclrtCreateEvent");
  *event = calloc(1, sizeof(fake_event));
  fake_events++;
  return done("aclrtCreateEvent", FAKE_OK);
}
int aclrtRecordEvent(void *event, void *stream) { pair_record(event, stream); return done("aclrtRecordEvent", FAKE_OK); }
int aclrtQueryEventStatus(void *event, int *status) {
  *status = pair_is_done(event);
  return done("aclrtQueryEventStatus", FAKE_OK);
}
int aclrtDestroyEvent(void *event) { free(event); fake_events--; return done("aclrtDestroyEvent", FAKE_OK); }
int aclrtSynchronizeDevice(void) { READY("aclrtSynchronizeDevice"); fake_device_syncs++; return done("aclrtSynchronizeDevice", FAKE_OK); }
const char *aclGetRecentErrMsg(void) { fake_last_error = 0; return message; }

/* --- libhccl ------------------------------------------------------------------------------------------------------ */

typedef struct {
  size_t size;
  uint32_t magic, version;
  uint64_t reserved;
  uint32_t buffer_mib, deterministic;
} hccl_config;

/* HCCL_E_NETWORK, _PARA, _NOT_SUPPORT, _REMOTE, _AGAIN, _MEMORY */
static const int hccl_codes[] = {0, 19, 1, 5, 21, 20, 3};

int HcclGetRootInfo(char *info) {
  fake_root root;
  int status = pair_root(&root);
  memset(info, 0, 4108);
  memcpy(info, &root, sizeof root);
  return hccl_codes[status];
}
/* Blocks until both are there. Each communicator has two buffers on the device. */
int HcclCommInitRootInfoConfig(uint32_t size, const char *info, uint32_t rank, const hccl_config *config,
                               fake_comm **comm) {
  fake_root root;
  memcpy(&root, info, sizeof root);
  if (size != 2 || config->size != sizeof *config || config->magic != 0xf0f0f0f0 || config->version < 1) return 1;
  int status = pair_begin(comm, &root, (int)rank, (size_t)config->buffer_mib << 21);
  if (status != PAIR_OK) return hccl_codes[status];
  while ((status = pair_state(*comm)) == PAIR_PENDING) usleep(1000);
  if (status != PAIR_OK) pair_abort(*comm), *comm = NULL;
  return hccl_codes[status];
}
int HcclGetCommAsyncError(fake_comm *comm, int *state) {
  *state = hccl_codes[pair_state(comm)];
  return comm->magic == PAIR_MAGIC ? 0 : 1;
}
static int hccl_move(void *data, uint64_t count, int dtype, uint32_t peer, fake_comm *comm, void *stream, int is_send) {
  int status = pair_require(comm);
  if (status != PAIR_OK) return hccl_codes[status];
  if (dtype < 0 || dtype > 11 || dtype == 10 /* float64 */) return 5;
  if ((int)peer != 1 - comm->rank) return 1;
  pair_queue(comm, pair_op(data, count, (uint32_t)dtype, stream, is_send), 1);
  return 0;
}
int HcclSend(void *data, uint64_t count, int dtype, uint32_t peer, fake_comm *comm, void *stream) {
  return hccl_move(data, count, dtype, peer, comm, stream, 1);
}
int HcclRecv(void *data, uint64_t count, int dtype, uint32_t peer, fake_comm *comm, void *stream) {
  return hccl_move(data, count, dtype, peer, comm, stream, 0);
}
int HcclCommDestroy(fake_comm *comm) { return hccl_codes[pair_abort(comm)]; }
const char *HcclGetErrorString(int code) { return code == 21 ? "remote error" : "call refused"; }
