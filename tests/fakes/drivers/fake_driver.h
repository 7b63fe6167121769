/* A vendor runtime library in miniature: device memory is an anonymous shared file, so that a second process can map it
 * by (pid, fd, inode), like a driver's IPC handle. The vendor files give these functions their real names and types. */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FAKE_MAX_BLOCKS 256
#define FAKE_MAX_DEVICES 16

/* Each vendor file has its code for each. */
enum {
  FAKE_OK, FAKE_INVALID, FAKE_OOM, FAKE_GONE, FAKE_MAPPED, FAKE_NO_DEVICE, FAKE_OWN_HANDLE, FAKE_FORKED,
  FAKE_REGISTERED, FAKE_NOT_REGISTERED
};

typedef struct {
  void *pointer;
  size_t size;
  int fd;
  int imported;
  int device; /* as this process numbers it */
} fake_block;

typedef struct {
  int32_t pid, fd;
  uint64_t inode, size;
  int32_t ordinal, physical; /* of the device: the exporter's number, and the host's */
} fake_handle;

/* Host memory whose pages the driver keeps in place. */
typedef struct {
  const char *pointer;
  size_t size;
  uint64_t inode;
} fake_host;

static fake_block fake_blocks[FAKE_MAX_BLOCKS];
static fake_host fake_hosts[FAKE_MAX_BLOCKS];
static long fake_registers, fake_unregisters, fake_pinned_copies, fake_host_mallocs;
static size_t fake_total = (size_t)1 << 30, fake_used;
static long fake_mallocs, fake_frees, fake_exports, fake_unexports, fake_opens, fake_closes, fake_copies, fake_last_kind;
static long fake_streams_created, fake_stream_syncs, fake_device_syncs, fake_open_flags;
static long fake_last_error, fake_events;
static _Thread_local int fake_device;
static int fake_visible[FAKE_MAX_DEVICES], fake_num_visible, fake_pid;
static char fake_fail_name[64];
static int fake_fail_code, fake_fail_times;

/* Inode of the shared file that is mapped at all of [pointer, pointer + size); 0 if there is none. */
static uint64_t fake_mapped_inode(const void *pointer, size_t size) {
  unsigned long long start, stop, inode, found = 0, at = (uintptr_t)pointer;
  char line[512];
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
    if (sscanf(line, "%llx-%llx %*s %*s %*s %llu", &start, &stop, &inode) == 3 && start <= at && at + size <= stop)
      found = inode;
  if (maps != NULL) fclose(maps);
  return found;
}

static fake_host *fake_host_of(const void *pointer, size_t size);

/* Whether this is device memory. In whole runs that is all memory that torch has, but for what is shared or pinned. */
int fake_owns(const void *pointer, size_t size) {
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_blocks[i].pointer && (char *)fake_blocks[i].pointer <= (const char *)pointer &&
        (const char *)pointer + size <= (char *)fake_blocks[i].pointer + fake_blocks[i].size)
      return 1;
  return getenv("FAKE_DEVICE_HAS_ALL_BUT_SHARED_MEMORY") && !fake_mapped_inode(pointer, size) && !fake_host_of(pointer, size);
}

static long fake_count_hosts(int unmapped_only) {
  long count = 0;
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_hosts[i].inode &&
        !(unmapped_only && fake_mapped_inode(fake_hosts[i].pointer, fake_hosts[i].size) == fake_hosts[i].inode))
      count++;
  return count;
}

/* --- what tests use ---------------------------------------------------------------------------------------------- */

void fake_set_total(size_t total) { fake_total = total; }

/* The next `times` calls of the function called `name` return `code`. */
void fake_fail(const char *name, int code, int times) {
  snprintf(fake_fail_name, sizeof fake_fail_name, "%s", name);
  fake_fail_code = code;
  fake_fail_times = times;
}

long fake_counter(const char *name) {
  const struct { const char *name; long value; } all[] = {
      {"mallocs", fake_mallocs}, {"frees", fake_frees}, {"exports", fake_exports}, {"unexports", fake_unexports},
      {"opens", fake_opens}, {"closes", fake_closes}, {"copies", fake_copies}, {"last_kind", fake_last_kind},
      {"streams_created", fake_streams_created},
      {"stream_syncs", fake_stream_syncs}, {"device_syncs", fake_device_syncs}, {"last_error", fake_last_error},
      {"open_flags", fake_open_flags}, {"events", fake_events}, {"device", fake_device}, {"used", (long)fake_used},
      {"registers", fake_registers}, {"unregisters", fake_unregisters}, {"pinned_copies", fake_pinned_copies},
      {"host_mallocs", fake_host_mallocs}, {"registered", fake_count_hosts(0)}, {"unmapped_registered", fake_count_hosts(1)}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (strcmp(all[i].name, name) == 0) return all[i].value;
  return -1;
}

void fake_reset(void) {
  fake_pid = 0;
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_blocks[i].pointer) {
      munmap(fake_blocks[i].pointer, fake_blocks[i].size);
      close(fake_blocks[i].fd);
      fake_blocks[i].pointer = NULL;
    }
  memset(fake_hosts, 0, sizeof fake_hosts);
  fake_registers = fake_unregisters = fake_host_mallocs = fake_pinned_copies = 0;
  fake_total = (size_t)1 << 30;
  fake_used = 0;
  fake_mallocs = fake_frees = fake_exports = fake_unexports = fake_opens = fake_closes = fake_copies = 0;
  fake_streams_created = fake_stream_syncs = fake_device_syncs = fake_open_flags = 0;
  fake_last_error = fake_last_kind = fake_fail_times = fake_device = 0;
}

/* --- what the vendor files use ----------------------------------------------------------------------------------- */

/* The host has FAKE_NUM_DEVICES (2). The variable of the vendor is read once, at the first call; from then on the library
 * is of no use to a forked child. */
static int fake_start(const char *variable) {
  if (fake_pid) return fake_pid == getpid() ? FAKE_OK : FAKE_FORKED;
  const char *number = getenv("FAKE_NUM_DEVICES"), *list = getenv(variable);
  int there = number ? atoi(number) : 2;
  fake_pid = getpid();
  fake_num_visible = 0;
  for (int i = 0; !list && i < there; i++) fake_visible[fake_num_visible++] = i;
  while (list && *list) { /* as the real ones, nothing after the first that is not there */
    char *end;
    long physical = strtol(list, &end, 10);
    if (end == list || physical < 0 || physical >= there) break;
    fake_visible[fake_num_visible++] = (int)physical;
    list = *end == ',' ? end + 1 : end;
  }
  return FAKE_OK;
}

static int fake_injected(const char *name) {
  if (fake_fail_times <= 0 || strcmp(name, fake_fail_name) != 0) return 0;
  fake_fail_times--;
  return fake_fail_code;
}

static fake_block *fake_find(const void *pointer) {
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_blocks[i].pointer != NULL && fake_blocks[i].pointer == pointer) return &fake_blocks[i];
  return NULL;
}

static int fake_map(int fd, size_t size, int imported, void **pointer) {
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++) {
    if (fake_blocks[i].pointer != NULL) continue;
    void *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return FAKE_INVALID;
    fake_blocks[i] = (fake_block){mapped, size, fd, imported, fake_device};
    *pointer = mapped;
    return FAKE_OK;
  }
  return FAKE_INVALID;
}

static int fake_malloc(void **pointer, size_t size) {
  if (size > fake_total - fake_used) return FAKE_OOM;
  int fd = memfd_create("fake-device", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size) != 0) return FAKE_INVALID;
  int status = fake_map(fd, size, 0, pointer);
  if (status == FAKE_OK) fake_used += size, fake_mallocs++;
  return status;
}

/* Every importer holds a shared lock on the file of its block, which ends with its process at the latest. */
static int fake_has_importers(const fake_block *block) {
  if (flock(block->fd, LOCK_EX | LOCK_NB) != 0) return 1;
  flock(block->fd, LOCK_UN);
  return 0;
}

/* Stricter than some real ones, for which this is undefined: what another process has mapped cannot be freed. */
static int fake_release(void *pointer, int imported) {
  fake_block *block = fake_find(pointer);
  if (block == NULL || block->imported != imported) return FAKE_INVALID;
  if (!imported && fake_has_importers(block)) return FAKE_MAPPED;
  if (imported) flock(block->fd, LOCK_UN); /* a forked child may have the file too */
  munmap(block->pointer, block->size);
  close(block->fd);
  block->pointer = NULL;
  if (imported)
    fake_closes++;
  else
    fake_used -= block->size, fake_frees++;
  return FAKE_OK;
}

/* Like the real ones: only the base of an allocation of this process has a handle. */
static int fake_export(void *pointer, fake_handle *handle) {
  fake_block *block = fake_find(pointer);
  struct stat status;
  if (block == NULL || block->imported || fstat(block->fd, &status) != 0) return FAKE_INVALID;
  *handle = (fake_handle){getpid(), block->fd, status.st_ino, block->size, block->device, fake_visible[block->device]};
  fake_exports++;
  return FAKE_OK;
}

static int fake_open(const fake_handle *handle, void **pointer) {
  char path[64];
  struct stat status;
  if (handle->pid == getpid()) return FAKE_OWN_HANDLE;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return FAKE_GONE;
  if (fstat(fd, &status) != 0 || status.st_ino != handle->inode || (uint64_t)status.st_size != handle->size) {
    close(fd);
    return FAKE_GONE;
  }
  int result = flock(fd, LOCK_SH | LOCK_NB) == 0 ? fake_map(fd, handle->size, 1, pointer) : FAKE_GONE;
  if (result == FAKE_OK) fake_opens++;
  return result;
}

static fake_host *fake_host_of(const void *pointer, size_t size) {
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_hosts[i].pointer && fake_hosts[i].pointer <= (const char *)pointer &&
        (const char *)pointer + size <= fake_hosts[i].pointer + fake_hosts[i].size)
      return &fake_hosts[i];
  return NULL;
}

/* Refuses what the real ones refuse, and what they only forgive: memory that is not mapped, or not by whole pages. */
static int fake_register_locked(void *pointer, size_t size) {
  uint64_t inode = fake_mapped_inode(pointer, size);
  if (size == 0 || inode == 0 || (uintptr_t)pointer % 4096) return FAKE_INVALID;
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++)
    if (fake_hosts[i].pointer && fake_hosts[i].pointer < (char *)pointer + size &&
        (char *)pointer < fake_hosts[i].pointer + fake_hosts[i].size)
      return FAKE_REGISTERED;
  for (int i = 0; i < FAKE_MAX_BLOCKS; i++) {
    if (fake_hosts[i].pointer) continue;
    fake_hosts[i] = (fake_host){pointer, size, inode};
    fake_registers++;
    return FAKE_OK;
  }
  return FAKE_INVALID;
}

static pthread_mutex_t fake_hosts_lock = PTHREAD_MUTEX_INITIALIZER;

static int fake_register(void *pointer, size_t size) {
  pthread_mutex_lock(&fake_hosts_lock);
  int status = fake_register_locked(pointer, size);
  pthread_mutex_unlock(&fake_hosts_lock);
  return status;
}

static int fake_unregister(void *pointer) {
  fake_host *host = fake_host_of(pointer, 1);
  if (host == NULL || host->pointer != (char *)pointer) return FAKE_NOT_REGISTERED;
  if (fake_mapped_inode(host->pointer, host->size) != host->inode) return FAKE_INVALID;
  *host = (fake_host){0};
  fake_unregisters++;
  return FAKE_OK;
}

static int fake_copy(void *dst, const void *src, size_t size, int kind) {
  memcpy(dst, src, size);
  fake_copies++;
  if (fake_host_of(dst, size) || fake_host_of(src, size)) fake_pinned_copies++;
  fake_last_kind = kind;
  return FAKE_OK;
}
#endif
