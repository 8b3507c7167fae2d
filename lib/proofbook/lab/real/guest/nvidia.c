// SPDX-License-Identifier: GPL-2.0
/*
 * The proofbook lab's stand-in for the NVIDIA driver. It binds QEMU's "edu" devices as if they were GPUs: real driver links, a real
 * bound state, real kernel lines, device nodes that open, and /proc/driver/nvidia. It computes nothing.
 *
 * Once bound, a device has a GPU's vendor, device and class in sysfs, and a link of sixteen lanes; its configuration space says what it is.
 *
 * Each bound device has two write-only attributes:
 *   stand_in_dma   an address; the device writes four bytes to it by DMA, through the IOMMU. An address that nobody mapped is a fault.
 *   stand_in_line  a text; the kernel prints it as this driver would.
 */
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/version.h>

#define STAND_IN_VERSION "595.58.03"
#define MOST_GPUS 8

#define GPU_VENDOR 0x10de
#define GPU_DEVICE 0x2bb5
#define GPU_CLASS 0x030200

/* The registers of the edu device that move data. */
#define EDU_DMA_SOURCE 0x80
#define EDU_DMA_TARGET 0x88
#define EDU_DMA_COUNT 0x90
#define EDU_DMA_COMMAND 0x98
#define EDU_DMA_START_TO_MEMORY 0x3
#define EDU_BUFFER 0x40000

struct gpu {
	struct pci_dev *device;
	void __iomem *registers;
	struct proc_dir_entry *folder;
	int minor;
};

static struct proc_dir_entry *driver_folder, *gpus_folder;
static int bound;

static ssize_t stand_in_dma_store(struct device *d, struct device_attribute *a, const char *text, size_t size)
{
	struct gpu *gpu = dev_get_drvdata(d);
	u64 address;
	int tries = 0;
	int wrong = kstrtou64(text, 0, &address);

	if (wrong)
		return wrong;
	writeq(EDU_BUFFER, gpu->registers + EDU_DMA_SOURCE);
	writeq(address, gpu->registers + EDU_DMA_TARGET);
	writeq(4, gpu->registers + EDU_DMA_COUNT);
	writeq(EDU_DMA_START_TO_MEMORY, gpu->registers + EDU_DMA_COMMAND);
	while ((readq(gpu->registers + EDU_DMA_COMMAND) & 1) && tries++ < 300)
		msleep(10);
	return size;
}
static DEVICE_ATTR_WO(stand_in_dma);

static ssize_t stand_in_line_store(struct device *d, struct device_attribute *a, const char *text, size_t size)
{
	printk(KERN_ERR "%.*s\n", (int)(size && text[size - 1] == '\n' ? size - 1 : size), text);
	return size;
}
static DEVICE_ATTR_WO(stand_in_line);

/* The edu device sits on the conventional bus and has no link; these are the attributes that a GPU's link has. */
static ssize_t link_speed_show(struct device *d, struct device_attribute *a, char *text)
{
	return sysfs_emit(text, "32.0 GT/s PCIe\n");
}

static ssize_t link_width_show(struct device *d, struct device_attribute *a, char *text)
{
	return sysfs_emit(text, "16\n");
}

static struct device_attribute link[] = {
	__ATTR(current_link_speed, 0444, link_speed_show, NULL),
	__ATTR(max_link_speed, 0444, link_speed_show, NULL),
	__ATTR(current_link_width, 0444, link_width_show, NULL),
	__ATTR(max_link_width, 0444, link_width_show, NULL),
};

static int show_version(struct seq_file *file, void *nothing)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " STAND_IN_VERSION
		       "  stand-in of the proofbook lab\n");
	return 0;
}

static int show_params(struct seq_file *file, void *nothing)
{
	seq_puts(file, "DmaRemapPeerMmio: 1\nEnableGpuFirmware: 18\nRegistryDwords: \"\"\n");
	return 0;
}

static int show_information(struct seq_file *file, void *nothing)
{
	struct gpu *gpu = file->private;
	struct pci_dev *device = gpu->device;

	seq_printf(file, "Model: \t\t Stand-in of the proofbook lab\n");
	seq_printf(file, "IRQ:   \t\t %d\n", device->irq);
	seq_printf(file, "GPU UUID: \t GPU-00000000-57a4-4d14-8000-0000%04x%02x%02x\n", pci_domain_nr(device->bus), device->bus->number,
		   device->devfn);
	seq_printf(file, "Bus Location: \t %s\n", pci_name(device));
	seq_printf(file, "Device Minor: \t %d\n", gpu->minor);
	return 0;
}

static int opened(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations node_operations = { .owner = THIS_MODULE, .open = opened };
static struct miscdevice nodes[MOST_GPUS + 2];
static char node_names[MOST_GPUS][8];

static int probe(struct pci_dev *device, const struct pci_device_id *id)
{
	struct gpu *gpu = devm_kzalloc(&device->dev, sizeof(*gpu), GFP_KERNEL);
	int wrong, attribute;

	if (!gpu)
		return -ENOMEM;
	wrong = pcim_enable_device(device);
	if (wrong)
		return wrong;
	pci_set_master(device);
	gpu->registers = pcim_iomap(device, 0, 0);
	if (!gpu->registers)
		return -ENODEV;
	gpu->device = device;
	gpu->minor = bound++;
	dev_set_drvdata(&device->dev, gpu);
	gpu->folder = proc_mkdir(pci_name(device), gpus_folder);
	if (gpu->folder)
		proc_create_single_data("information", 0444, gpu->folder, show_information, gpu);
	wrong = device_create_file(&device->dev, &dev_attr_stand_in_dma);
	if (!wrong)
		wrong = device_create_file(&device->dev, &dev_attr_stand_in_line);
	for (attribute = 0; !wrong && attribute < ARRAY_SIZE(link); attribute++)
		wrong = device_create_file(&device->dev, &link[attribute]);
	device->vendor = GPU_VENDOR;
	device->device = GPU_DEVICE;
	device->class = GPU_CLASS;
	dev_info(&device->dev, "enabling device (stand-in of the proofbook lab)\n");
	return wrong;
}

static void remove(struct pci_dev *device)
{
	struct gpu *gpu = dev_get_drvdata(&device->dev);
	int attribute;

	for (attribute = 0; attribute < ARRAY_SIZE(link); attribute++)
		device_remove_file(&device->dev, &link[attribute]);
	device_remove_file(&device->dev, &dev_attr_stand_in_line);
	device_remove_file(&device->dev, &dev_attr_stand_in_dma);
	if (gpu->folder)
		proc_remove(gpu->folder);
	bound--;
}

static const struct pci_device_id known[] = { { PCI_DEVICE(0x1234, 0x11e8) }, { PCI_DEVICE(GPU_VENDOR, GPU_DEVICE) }, {} };
MODULE_DEVICE_TABLE(pci, known);
static struct pci_driver driver = { .name = "nvidia", .id_table = known, .probe = probe, .remove = remove };

static int add_node(int place, const char *name)
{
	nodes[place].minor = MISC_DYNAMIC_MINOR;
	nodes[place].name = name;
	nodes[place].fops = &node_operations;
	nodes[place].mode = 0666;
	return misc_register(&nodes[place]);
}

static int __init start(void)
{
	int place, wrong;

	driver_folder = proc_mkdir("driver/nvidia", NULL);
	gpus_folder = proc_mkdir("gpus", driver_folder);
	proc_create_single("version", 0444, driver_folder, show_version);
	proc_create_single("params", 0444, driver_folder, show_params);
	pr_info("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  " STAND_IN_VERSION "  (stand-in of the proofbook lab)\n");
	wrong = pci_register_driver(&driver);
	if (wrong) {
		proc_remove(driver_folder);
		return wrong;
	}
	for (place = 0; place < bound && place < MOST_GPUS; place++) {
		snprintf(node_names[place], sizeof(node_names[place]), "nvidia%d", place);
		add_node(place, node_names[place]);
	}
	add_node(MOST_GPUS, "nvidiactl");
	add_node(MOST_GPUS + 1, "nvidia-uvm");
	return 0;
}

static void __exit stop(void)
{
	int place;

	for (place = 0; place < MOST_GPUS + 2; place++)
		if (nodes[place].name)
			misc_deregister(&nodes[place]);
	pci_unregister_driver(&driver);
	proc_remove(driver_folder);
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("proofbook lab: a stand-in, not NVIDIA's driver");
MODULE_VERSION(STAND_IN_VERSION);
